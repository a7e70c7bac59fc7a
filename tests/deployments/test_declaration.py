"""The strict reader of Serve configs, and every config of deployments/ through it."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from sakuradite.cli.exits import run
from sakuradite.cluster.declaration import problems
from tests.test_layers import ROOT as PACKAGE

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "deployments").glob("*.yaml"))
DRY_RUN: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "dry-run.yaml").read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_configs_are_in_order(path: Path) -> None:
    assert problems(path.read_text()) == []


def keys_of(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every key in nested mappings and lists."""
    if isinstance(value, list):
        return [found for number, item in enumerate(value) for found in keys_of(item, (*place, number))]
    if not isinstance(value, dict):
        return []
    return [found for key, below in value.items() for found in [(*place, key), *keys_of(below, (*place, key))]]


FREE = {"placement", "resources"}
"""Fields whose keys are the user's own."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_key_of_the_shipped_configs_is_refused_when_it_is_misspelt(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    for place in keys_of(content):
        if FREE & set(place[:-1]):
            continue
        misspelt = copy.deepcopy(content)
        within: Any = misspelt
        for part in place[:-1]:
            within = within[part]
        within[f"{place[-1]}x"] = within.pop(place[-1])
        found = problems(yaml.safe_dump(misspelt))
        assert any(f"{place[-1]}x: " in problem for problem in found), (place, found)


def deployments(options: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Gives the model's deployment some options."""

    def change(config: dict[str, Any]) -> None:
        config["applications"][1]["deployments"] = [{"name": "Model", **options}]

    return change


def setting(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value at a dotted place."""

    def change(config: dict[str, Any]) -> None:
        within: Any = config
        *parts, last = place.split(".")
        for part in parts:
            within = within[int(part)] if part.isdigit() else within.setdefault(part, {})
        within[last] = value

    return change


CASES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "top level": (setting("http_option", {}), "http_option: unknown; did you mean http_options?"),
    "http options": (setting("http_options.prot", 1), "http_options.prot: unknown; did you mean port?"),
    "application": (
        setting("applications.0.route_prefx", "/"),
        "applications[0].route_prefx: unknown; did you mean route_prefix?",
    ),
    "server": (
        setting("applications.0.args.config.default_modle", "x"),
        "applications[0].args.config.default_modle: unknown; did you mean default_model?",
    ),
    "model": (
        setting("applications.1.args.config.max_batch_sise", 3),
        "applications[1].args.config.max_batch_sise: unknown; did you mean max_batch_size?",
    ),
    "replicas": (
        setting("applications.1.args.config.replicas", {"min": 0, "mx": 1}),
        "applications[1].args.config.replicas.mx: unknown; did you mean max?",
    ),
    "arguments": (setting("applications.1.args.confg", {}), "applications[1].args.confg: unknown"),
    "deployment": (
        deployments({"max_ongoing_request": 1}),
        "applications[1].deployments[0].max_ongoing_request: unknown; did you mean max_ongoing_requests?",
    ),
    "autoscaling": (
        deployments({"autoscaling_config": {"min_replica": 1}}),
        "applications[1].deployments[0].autoscaling_config.min_replica: unknown; did you mean min_replicas?",
    ),
    "actor options": (
        deployments({"ray_actor_options": {"num_cpu": 1}}),
        "applications[1].deployments[0].ray_actor_options.num_cpu: unknown; did you mean num_cpus?",
    ),
    "runtime environment": (
        setting("applications.1.runtime_env", {"env_varss": {}}),
        "applications[1].runtime_env.env_varss: unknown; did you mean env_vars?",
    ),
    "a number in the environment": (
        setting("applications.1.runtime_env", {"env_vars": {"OMP_NUM_THREADS": 4}}),
        "applications[1].runtime_env.env_vars.OMP_NUM_THREADS: a text is expected; put it in quotes",
    ),
    "no environment": (
        setting("applications.1.runtime_env", {"env_vars": ["A=1"]}),
        "applications[1].runtime_env.env_vars: a mapping of names to texts is expected",
    ),
    "no such deployment": (
        setting("applications.0.deployments", [{"name": "Routr"}]),
        "applications[0].deployments[0].name: this application has no deployment 'Routr'; it has Catalog, Router",
    ),
    "no such module": (
        setting("applications.0.import_path", "sakuradite.cluster.aplication:server"),
        "applications[0].import_path: sakuradite.cluster.aplication:server cannot be imported here",
    ),
    "no module at all": (
        setting("applications.0.import_path", ".a:b"),
        "applications[0].import_path: .a:b cannot be imported here",
    ),
    "no such builder": (
        setting("applications.0.import_path", "sakuradite.cluster.application:sever"),
        "applications[0].import_path: sakuradite.cluster.application:sever cannot be imported here",
    ),
    "a module": (
        setting("applications.0.import_path", "os:path"),
        "applications[0].import_path: os:path is of type module; Serve takes an application, or a function",
    ),
    "no builder": (
        setting("applications.0.import_path", "sakuradite.config:ENVIRONMENT"),
        "applications[0].import_path: sakuradite.config:ENVIRONMENT is of type dict",
    ),
    "a function of several arguments": (
        setting("applications.0.import_path", "sakuradite.cluster.application:model_application"),
        "applications[0].import_path: sakuradite.cluster.application:model_application is a function of ",
    ),
    "a value": (
        setting("applications.1.args.config.max_batch_size", 0),
        "applications[1].args.config.max_batch_size: Input should be greater than or equal to 1",
    ),
    "a value of Serve's": (setting("http_options.port", "many"), "http_options.port: Input should be a valid integer"),
    "a model twice": (
        lambda config: config["applications"].append({**copy.deepcopy(config["applications"][1]), "name": "again"}),
        "applications[2].args.config.model: fake is declared by applications[1] already",
    ),
    "a proxy that gives up first": (
        setting("http_options.request_timeout_s", 60),
        "http_options.request_timeout_s: 60 s is below the deadline of fake (120 s)",
    ),
    "a key in the environment": (
        setting("applications.0.runtime_env", {"env_vars": {"SAKURADITE_API_KEY": "secret-1"}}),
        "applications[0].runtime_env.env_vars.SAKURADITE_API_KEY: a secret has no place in a config",
    ),
    "a token in the environment of an actor": (
        deployments({"ray_actor_options": {"runtime_env": {"env_vars": {"HF_TOKEN": "secret-1"}}}}),
        "applications[1].deployments[0].ray_actor_options.runtime_env.env_vars.HF_TOKEN: a secret",
    ),
    "a token by its look": (
        setting("applications.1.runtime_env", {"env_vars": {"MINE": "hf_secret1secret1secret1secret1secret1"}}),
        "applications[1].runtime_env.env_vars.MINE: a secret has no place in a config",
    ),
    "a password in a URL": (
        setting("applications.1.runtime_env", {"pip": ["x", "y @ https://me:secret-1@host/y.whl"]}),
        "applications[1].runtime_env.pip[1]: a secret has no place in a config",
    ),
    "a key in the arguments": (
        setting("applications.0.args.config.api_key", "secret-1"),
        "applications[0].args.config: Value error, api_key cannot be set here: a Serve config is no secret",
    ),
    "an address that has no effect": (
        setting("applications.0.args.config.port", 80),
        "applications[0].args.config: Value error, port cannot be set here: Serve's proxy listens",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named_with_its_place(name: str) -> None:
    change, expected = CASES[name]
    config = copy.deepcopy(DRY_RUN)
    change(config)
    found = problems(yaml.safe_dump(config))
    assert [p for p in found if p.startswith(expected)], found
    assert "secret-1" not in " ".join(found)


@pytest.mark.parametrize(
    "name",
    ["SAKURADITE_ADMIN_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY",
     "REDIS_PASSWORD", "db_password", "APIKEY", "OTEL_EXPORTER_OTLP_HEADERS"],
)  # fmt: skip
def test_a_secret_in_the_environment_of_a_config_is_named_and_not_shown(name: str) -> None:
    config = copy.deepcopy(DRY_RUN)
    config["applications"][1]["runtime_env"] = {"env_vars": {name: "secret-1"}}
    (found,) = problems(yaml.safe_dump(config))
    assert found.startswith(f"applications[1].runtime_env.env_vars.{name}: a secret has no place in a config")
    assert "set it in the environment of Ray's processes" in found
    assert "secret-1" not in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN_PATH", "/run/secrets/hf"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/run/secrets/google.json"),
        ("AWS_ACCESS_KEY_ID", "AKIA"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("RAY_AUTH_MODE", "token"),
        ("HF_TOKEN", ""),
        ("HF_TOKEN", "${HF_TOKEN}"),
        ("INDEX", "https://${USER}@host/"),
        ("REPOSITORY", "git+ssh://git@host/x.git"),
    ],
)
def test_what_is_no_secret_may_stand_in_a_config(name: str, value: str) -> None:
    config = copy.deepcopy(DRY_RUN)
    config["applications"][1]["runtime_env"] = {"env_vars": {name: value}}
    assert problems(yaml.safe_dump(config)) == []


def test_a_secret_in_plain_text_in_the_pods_of_a_manifest_is_named_and_not_shown() -> None:
    manifest = (ROOT / "cluster-configs" / "kuberay" / "rayservice-cpu.yaml").read_text()
    assert problems(manifest) == []
    secret = "valueFrom: {secretKeyRef: {name: sakuradite-keys, key: api-key}}"
    assert secret in manifest
    (found, *more) = problems(manifest.replace(secret, "value: secret-1"))
    assert found.startswith("sakuradite.spec.rayClusterConfig.headGroupSpec.template.spec.containers[0].env[")
    assert "SAKURADITE_API_KEY is a secret; take it from one (valueFrom: {secretKeyRef: ...})" in found
    assert "secret-1" not in " ".join([found, *more])


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2", "'a' stands twice"),
        ("[1", "expected ',' or ']'"),
        ("", "no Serve config and no RayService in it"),
        ("kind: Secret", "no Serve config and no RayService in it"),
        ("- 1", "document 1 is no mapping"),
        ("applications: 3", "applications: Input should be a valid list"),
        ("kind: RayService\nspec: {}", "RayService.spec.serveConfigV2: a text is expected"),
        ("kind: RayService\nmetadata: {name: x}\nspec: {serveConfigV2: 'applications: 3'}",
         "x.spec.serveConfigV2: applications: Input should be a valid list"),
        ("kind: RayService\nmetadata:\nspec:", "RayService.spec.serveConfigV2: a text is expected"),
        ("kind: RayService\nmetadata: x\nspec: y", "RayService.spec.serveConfigV2: a text is expected"),
        ("5", "document 1 is no mapping"),
        ("? [a, b]\n: c", "a list or a mapping is no key"),
        ("a: !!python/object/apply:os.abort []", "could not determine a constructor"),
        ("[" * 5000, "nested too deep"),
        ("applications: &a\n- *a", "nested deeper than 100 levels, or an alias within what it stands for"),
        ("a: " + "{a: " * 150 + "}" * 150, "nested deeper than 100 levels"),
        (BOMB, "more than 100,000 values, each alias counted as what it stands for"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_problem(text: str, problem: str) -> None:
    (found,) = problems(text)
    assert problem in found


def test_a_number_written_as_a_text_is_compared_as_a_number() -> None:
    config = {**DRY_RUN, "http_options": {**DRY_RUN.get("http_options", {}), "request_timeout_s": "0.5"}}
    assert "http_options.request_timeout_s: 0.5 s is below the deadline of fake" in problems(yaml.safe_dump(config))[0]


def test_merges_are_read() -> None:
    text = (ROOT / "deployments" / "dry-run.yaml").read_text()
    text = text.replace(
        "        model: fake\n        backend: fake", "        <<: {backend: fake}\n        model: fake"
    )
    assert "<<" in text
    assert problems(text) == []


def test_the_command_prints_problems_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = ROOT / "deployments" / "dry-run.yaml", tmp_path / "bad.yaml"
    bad.write_text(good.read_text().replace("default_model", "default_modle"))
    assert run(["check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: ok\n"
    assert run(["check", str(good), str(bad)]) == 1
    problem = "applications[0].args.config.default_modle: unknown; did you mean default_model?"
    assert capsys.readouterr().out.splitlines() == [f"{good}: ok", f"{bad}: {problem}"]
    assert run(["check", "--json", str(bad)]) == 1
    assert orjson.loads(capsys.readouterr().out) == {"files": [{"file": str(bad), "problems": [problem]}]}
    assert run(["check", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: No such file" in capsys.readouterr().err


def test_the_command_asks_for_the_extra_where_ray_is_missing() -> None:
    code = (
        "import sys; sys.modules['yaml'] = None\nfrom sakuradite.cli.exits import run\n"
        "sys.exit(run(['check', 'deployments/dry-run.yaml']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: Checking Serve configs needs the extra [server]: pip install 'sakuradite[server]'\n"
