"""Serve configs on a real Ray, by `serve deploy` and by Ray's REST API, beside what the admin API loads."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sakuradite.cluster.declaration import problems, serve_configs
from tests.cluster.processes import eventually
from tests.deployments.conftest import ROOT, Head, load_config, start_head

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = load_config(ROOT / "deployments" / "dry-run.yaml")


def declare(config: dict[str, Any], name: str, **model: Any) -> None:
    """One more model."""
    arguments = {"config": {"backend": "fake", **model}}
    path = "sakuradite.cluster.application:model"
    config["applications"].append({"name": name, "route_prefix": None, "import_path": path, "args": arguments})


def load(head: Head, model: str) -> None:
    operation = head.admin.post("/admin/v1/models/load", json={"model": model, "backend": "fake"}).json()
    assert eventually(
        lambda: head.admin.get(f"/admin/v1/operations/{operation['id']}").json()["status"] == "succeeded", 60
    )


@contextmanager
def asked_all_the_while(head: Head, model: str) -> Iterator[list[int]]:
    """Decisions of a model one after another; their status codes."""
    codes: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            codes.append(head.decide(model).status_code)
            time.sleep(0.05)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield codes
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def served(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Head:
    """The head with the dry run on it, checked and deployed by the commands that its first lines name."""
    file = tmp_path_factory.mktemp("deployed") / "config.yaml"
    file.write_text(yaml.safe_dump(head.here(CONFIG)))
    assert head.command("sakuradite", "check", str(file)).stdout == f"{file}: ok\n"
    deployed = head.command("serve", "deploy", "-a", head.dashboard, str(file))
    assert deployed.returncode == 0, deployed.stderr

    def ready() -> bool:
        try:
            return httpx.get(f"{head.client.base_url}/readyz", trust_env=False, timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    assert eventually(ready, 90), head.details()
    return head


@pytest.fixture
def dry_run(served: Head) -> Iterator[Head]:
    """The same, and the dry run is put back after the test."""
    yield served
    assert served.put(served.here(CONFIG)).status_code == 200
    assert served.becomes("fake", status="ready")


def test_serve_deploy_serves_behind_serves_proxy_and_a_key_is_mandatory(served: Head) -> None:
    head = served
    with httpx.Client(base_url=head.client.base_url, trust_env=False, timeout=30) as open_client:
        assert open_client.get("/healthz").json() == {"status": "ok"}
        assert open_client.get("/-/healthz").text == "success"
        assert open_client.get("/docs").status_code == 401
        body = {"model": "fake", "state": "x", "questions": {"q": {"type": "noul", "instructions": "y"}}}
        assert open_client.post("/v1/decisions", json=body).status_code == 401
        assert open_client.get("/admin/v1/models").status_code == 401
    assert head.decide("fake").json()["model"] == "fake"
    assert head.client.get("/docs").headers["content-type"].startswith("text/html")
    assert head.client.get("/admin/v1/models").status_code == 401
    told = httpx.get(f"{head.dashboard}/api/serve/applications/", trust_env=False)
    assert told.status_code == 401, "Ray's own token is asked for"
    assert "inference-key" not in str(head.details())
    assert "admin-key" not in str(head.details())


def test_declared_and_loaded_models_live_side_by_side(dry_run: Head) -> None:
    head = dry_run
    load(head, "loaded")
    shown = {m["model"]: m for m in head.admin.get("/admin/v1/models").json()}
    assert {name: m["status"] for name, m in shown.items()} == {"loaded": "ready", "fake": "ready"}
    assert {"loaded", "fake"} <= {m["id"] for m in head.client.get("/v1/models").json()["data"]}
    for path, content in (("load", {"model": "fake", "backend": "fake"}), ("unload", {"model": "fake"})):
        refused = head.admin.post(f"/admin/v1/models/{path}", json=content)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "invalid_lifecycle")
        assert "declared by the Serve application 'model-fake'" in refused.text

    changed = copy.deepcopy(CONFIG)
    changed["applications"][1]["args"]["config"]["max_batch_size"] = 4
    declare(changed, "model-more", model="more")
    with asked_all_the_while(head, "loaded") as codes:
        assert head.put(head.here(changed)).status_code == 200
        assert head.becomes("more", status="ready")["config"]["model"] == "more"
        assert eventually(lambda: (head.status("fake") or {})["config"]["max_batch_size"] == 4, 60)
        before = len(codes)
        assert head.decide("more").status_code == 200
        assert eventually(lambda: len(codes) > before + 5, 30)
    assert set(codes) == {200}, "a redeploy does not touch what was loaded"

    assert head.put(head.here(CONFIG)).status_code == 200
    assert eventually(lambda: head.status("more") is None, 60)
    assert head.decide("more").status_code == 404
    assert head.decide("loaded").status_code == 200
    assert head.admin.post("/admin/v1/models/unload", json={"model": "loaded"}).status_code == 200
    assert head.status("loaded") is None
    assert head.decide("fake").status_code == 200


def test_another_model_under_an_applications_name_is_another_model(dry_run: Head) -> None:
    head = dry_run
    changed = copy.deepcopy(CONFIG)
    changed["applications"][1]["args"]["config"]["model"] = "other"
    with asked_all_the_while(head, "fake") as codes:
        assert head.put(head.here(changed)).status_code == 200
        assert head.becomes("other", status="ready")
        assert eventually(lambda: codes[-1] == 404, 30)
    assert set(codes) <= {200, 404, 503}
    assert head.status("fake") is None
    assert head.decide("other").json()["model"] == "other"


def test_what_cannot_be_deployed_says_why_and_harms_nothing_else(dry_run: Head) -> None:
    head = dry_run
    config = copy.deepcopy(CONFIG)
    declare(config, "model-none", model="/no/such/folder", backend="torch", device="cpu")
    declare(config, "model-misspelt", model="misspelt", max_batch_sise=3)
    assert "applications[3].args.config.max_batch_sise: unknown; did you mean max_batch_size?" in problems(
        yaml.safe_dump(config)
    )
    assert head.put(head.here(config)).status_code == 200
    failed = head.becomes("/no/such/folder", status="failed")
    assert failed["last_error"]["code"] == "model_not_found"
    assert "/no/such/folder" in failed["last_error"]["message"]
    assert head.decide("/no/such/folder").status_code == 404

    assert eventually(lambda: failed_with(head, "model-misspelt", "max_batch_sise", "Extra inputs"), 60)
    assert head.decide("fake").status_code == 200
    assert head.put(head.here(CONFIG)).status_code == 200
    assert eventually(lambda: head.status("/no/such/folder") is None, 60)


def failed_with(head: Head, name: str, *words: str) -> bool:
    """Whether Serve could not deploy an application, and says this."""
    found = head.details()["applications"].get(name, {})
    told = f"{found.get('message')} {found.get('deployments')}"
    return found.get("status") == "DEPLOY_FAILED" and all(word in told for word in words)


def test_without_a_key_nothing_is_served(tmp_path: Path) -> None:
    with start_head(tmp_path) as head:
        assert head.put(head.here(CONFIG)).status_code == 200
        words = ("an inference key is required", "SAKURADITE_API_KEY")
        assert eventually(lambda: failed_with(head, "sakuradite", *words), 90), head.details()["applications"]
        assert httpx.get(f"{head.client.base_url}/v1/models", trust_env=False).status_code in (404, 503)


def test_the_config_of_the_cpu_manifest_decides(head: Head, tiny: Callable[..., Path]) -> None:
    """As KubeRay would put it, but for the weights, and routers that share this one machine."""
    text = (ROOT / "cluster-configs" / "kuberay" / "rayservice-cpu.yaml").read_text()
    checkpoint = str(tiny())
    (found,) = serve_configs(text.replace("Qwen/Qwen3-0.6B", checkpoint))
    config = found.content
    del config["applications"][0]["deployments"]
    for application in config["applications"]:  # one configuration for all that Serve's proxy of this machine knows
        if "num_cpus" in application["args"].get("config", {}):
            application["args"]["config"] |= {"memory": 100 << 20}
    assert head.put(head.here(config)).status_code == 200
    shown = head.becomes(checkpoint, status="ready", replicas={"target": 2, "ready": 2})
    assert shown["capabilities"]["backend"] == "torch"
    answer = head.decide("default").json()
    assert answer["model"] == checkpoint
    assert sum(answer["answers"]["q"]["probabilities"].values()) == pytest.approx(1)
    assert httpx.get(f"{head.client.base_url}/readyz", trust_env=False).status_code == 200
    assert head.client.get("/docs").status_code == 200
    routers = head.details()["applications"]["sakuradite"]["deployments"]["Router"]["replicas"]
    assert len([replica for replica in routers if replica["state"] == "RUNNING"]) == 2


def test_serve_run_of_the_module_brings_router_and_model_as_one_application(head: Head) -> None:
    assert head.put({**head.here(CONFIG), "applications": []}).status_code == 200
    assert eventually(lambda: not head.details()["applications"], 60)
    head.environment["RAY_ADDRESS"] = head.address
    ran = head.command(
        "serve", "run", "--non-blocking", "deployments.per_gpu:application", "model=fake-run", "backend=fake"
    )
    assert ran.returncode == 0, ran.stderr
    assert head.becomes("fake-run", status="ready")["config"]["replicas"] == 1
    assert head.decide("default").json()["model"] == "fake-run"
    refused = head.command("serve", "run", "--non-blocking", "deployments.per_gpu:application", "modle=fake-run")
    assert refused.returncode != 0
    assert "modle" in refused.stderr
