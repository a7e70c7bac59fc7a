"""cluster-configs/kuberay: each key is one that the resource has, and everything that is referred to is there."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from sakuradite.cluster.application import ModelArguments
from sakuradite.cluster.declaration import problems, serve_configs
from sakuradite.cluster.resources import actor_options
from sakuradite.config import ReplicaRange
from tests.deployments.manifests import FILES, MANIFESTS, RAY, ROOT, Manifest, each, faults
from tests.deployments.test_declaration import keys_of

CLUSTERS = [m for m in MANIFESTS if m.kind in RAY]
SERVICES = [m for m in CLUSTERS if m.kind == "RayService"]

FREE = {"annotations", "labels", "matchLabels", "nodeSelector", "selector", "stringData", "requests", "limits"}
"""Mappings whose keys are names, not fields; the tests below look at those that matter."""


def test_the_files_are_those_that_the_docs_tell_of() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert {path.name for path in FILES} == set(re.findall(r"cluster-configs/kuberay/([a-z-]+\.yaml)", page))


@pytest.mark.parametrize("manifest", each(MANIFESTS))
def test_a_manifest_satisfies_its_schema(manifest: Manifest) -> None:
    assert faults(manifest.content) == []


@pytest.mark.parametrize("manifest", each(MANIFESTS))
def test_every_key_is_refused_when_it_is_misspelt(manifest: Manifest) -> None:
    for place in keys_of(manifest.content):
        if FREE & set(place[:-1]) or "rayStartParams" in place[:-1]:
            continue
        misspelt = copy.deepcopy(manifest.content)
        within: Any = misspelt
        for part in place[:-1]:
            within = within[part]
        within[f"{place[-1]}x"] = within.pop(place[-1])
        assert faults(misspelt), place


@pytest.mark.parametrize("manifest", each(MANIFESTS))
def test_resources_have_names_that_kubernetes_knows(manifest: Manifest) -> None:
    for place in keys_of(manifest.content):
        if len(place) > 1 and place[-2] in ("requests", "limits"):
            assert place[-1] in ("cpu", "memory", "nvidia.com/gpu", "storage"), place


@pytest.mark.parametrize("manifest", each(CLUSTERS))
def test_ray_is_started_with_options_that_it_has(manifest: Manifest) -> None:
    from tests.deployments.test_ray_up import START_OPTIONS

    for group in (manifest.cluster["headGroupSpec"], *manifest.cluster["workerGroupSpecs"]):
        assert {f"--{name}" for name in group["rayStartParams"]} <= START_OPTIONS


@pytest.mark.parametrize("manifest", each(SERVICES))
def test_the_serve_config_is_in_order_and_a_misspelt_key_in_it_is_found(manifest: Manifest) -> None:
    text = (ROOT / "cluster-configs" / "kuberay" / manifest.file).read_text()
    assert problems(text) == []
    assert problems(text.replace("default_model:", "default_modle:")) == [
        "sakuradite.spec.serveConfigV2: applications[0].args.config.default_modle: unknown; did you mean default_model?"
    ]


def names(kind: str) -> set[str]:
    """What there is of a kind: of the file set, or made by KubeRay for what is in it."""
    found = {m.name for m in MANIFESTS if m.kind == kind}
    if kind == "Service":
        found |= {f"{m.name}-serve-svc" for m in SERVICES}
    return found


def values_of(content: Any, key: str) -> list[Any]:
    """The values under a key, wherever it stands."""
    if isinstance(content, list):
        return [found for item in content for found in values_of(item, key)]
    if not isinstance(content, dict):
        return []
    return [f for k, v in content.items() for f in ([v] if k == key else []) + values_of(v, key)]


@pytest.mark.parametrize("manifest", each(MANIFESTS))
def test_what_is_referred_to_is_in_the_file_set(manifest: Manifest) -> None:
    content = manifest.content
    secrets = {m.name: set(m.content["stringData"]) for m in MANIFESTS if m.kind == "Secret"}
    for reference in values_of(content, "secretKeyRef"):
        assert reference.get("optional") or reference["key"] in secrets[reference["name"]]
    for claim in values_of(content, "persistentVolumeClaim"):
        assert claim["claimName"] in names("PersistentVolumeClaim")
    for service in values_of(content, "service"):
        assert service["name"] in names("Service")
    for address in values_of(content, "redisAddress"):
        host, port = address.split(":")
        (redis,) = [m for m in MANIFESTS if m.kind == "Service" and m.name == host]
        assert int(port) in [p["port"] for p in redis.content["spec"]["ports"]]
    for kind in ("configMap", "configMapKeyRef", "configMapRef", "secret", "secretRef", "serviceAccountName"):
        assert values_of(content, kind) == []  # nothing else is referred to; name it above when it is
    for secret in values_of(content, "secretName"):
        assert (secret, manifest.kind) == ("sakuradite-tls", "Ingress")  # the page says how it is made


@pytest.mark.parametrize("manifest", each([m for m in MANIFESTS if m.pods()]))
def test_mounts_ports_and_probes_fit_together(manifest: Manifest) -> None:
    for pod, container in manifest.containers():
        volumes = {v["name"] for v in pod["spec"].get("volumes", [])}
        volumes |= {c["metadata"]["name"] for c in manifest.content["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert len(set(ports.values())) == len(ports)
        for probe in ("livenessProbe", "readinessProbe"):
            way = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            assert way["port"] in ports
        for mount in container.get("volumeMounts", []):
            for variable in re.findall(r"\$\((\w+)\)", mount.get("subPathExpr", "")):
                assert variable in {entry["name"] for entry in container["env"]}


PUBLIC = {"/api/local_raylet_healthz": 52365, "/api/gcs_healthz": 8265, "/-/healthz": 8000}
"""Paths that answer without Ray's token, and the port that has them."""


@pytest.mark.parametrize("manifest", each(CLUSTERS))
def test_probes_ask_what_answers_without_a_token(manifest: Manifest) -> None:
    for _, container in manifest.containers():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("livenessProbe", "readinessProbe"):
            way = container[probe]["httpGet"]
            assert PUBLIC[way["path"]] == ports[way["port"]]


@pytest.mark.parametrize("manifest", each([m for m in MANIFESTS if m.pods()]))
def test_nothing_runs_as_root_and_everything_says_what_it_needs(manifest: Manifest) -> None:
    for pod, container in manifest.containers():
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] >= 999
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert resources["requests"]["cpu"]
        assert re.search(r":[0-9]", container["image"]), "a version, not whatever is latest"


@pytest.mark.parametrize("manifest", each(CLUSTERS))
def test_keys_come_from_the_secret_and_ray_asks_for_its_token(manifest: Manifest) -> None:
    assert manifest.cluster["authOptions"] == {"mode": "token"}
    for _, container in manifest.containers():
        environment = {entry["name"]: entry for entry in container["env"]}
        for variable, key in (("SAKURADITE_API_KEY", "api-key"), ("SAKURADITE_ADMIN_KEY", "admin-key")):
            reference = {"name": "sakuradite-keys", "key": key}
            assert environment[variable] == {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def test_no_secret_is_shipped() -> None:
    for secret in (m for m in MANIFESTS if m.kind == "Secret"):
        assert set(secret.content["stringData"].values()) == {""}


@pytest.mark.parametrize("budget", each([m for m in MANIFESTS if m.kind == "PodDisruptionBudget"]))
def test_a_disruption_budget_finds_the_workers_of_its_file_and_only_them(budget: Manifest) -> None:
    wanted = budget.content["spec"]["selector"]["matchLabels"].items()
    (cluster,) = [m for m in CLUSTERS if m.file == budget.file]
    head, *workers = [wanted <= pod["metadata"]["labels"].items() for pod in cluster.pods()]
    assert (head, set(workers)) == (False, {True})
    least = sum(group["minReplicas"] for group in cluster.cluster["workerGroupSpecs"])
    assert budget.content["spec"]["minAvailable"] < least, "or no node could be drained"


def test_every_cluster_has_a_disruption_budget() -> None:
    assert {m.file for m in CLUSTERS} == {m.file for m in MANIFESTS if m.kind == "PodDisruptionBudget"}


@pytest.mark.parametrize("manifest", each([m for m in MANIFESTS if m.kind in ("Service", "StatefulSet")]))
def test_selectors_find_their_pods(manifest: Manifest) -> None:
    selector = manifest.content["spec"]["selector"]
    wanted = selector.get("matchLabels", selector).items()
    assert any(wanted <= pod["metadata"]["labels"].items() for m in MANIFESTS for pod in m.pods())


@pytest.mark.parametrize("manifest", each(CLUSTERS))
def test_pods_keep_off_the_label_by_which_kuberay_finds_its_own(manifest: Manifest) -> None:
    for pod in manifest.pods():
        assert not [key for key in pod["metadata"]["labels"] if "/" in key]


@pytest.mark.parametrize("manifest", each(CLUSTERS))
def test_versions_are_those_of_this_project(manifest: Manifest) -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={manifest.cluster['rayVersion']}\n" in constraints
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    for _, container in manifest.containers():
        assert container["image"] == f"registry.example.com/sakuradite:{version[1]}"


UNITS = {"Gi": 1 << 30, "Mi": 1 << 20}


def amount(text: str) -> float:
    """A quantity of Kubernetes as a number."""
    return float(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else float(text)


@pytest.mark.parametrize("manifest", each(SERVICES))
def test_each_model_fits_the_workers_that_it_asks_for(manifest: Manifest) -> None:
    """All models at their least together, and each at its most alone: else a pod waits for ever."""
    (config,) = serve_configs(manifest.content["spec"]["serveConfigV2"])
    groups = manifest.cluster["workerGroupSpecs"]
    used: dict[str, dict[str, float]] = {group["groupName"]: {} for group in groups}
    models = [a for a in config.content["applications"] if a["import_path"].endswith(":model")]
    assert models
    for application in models:
        wanted = ModelArguments.model_validate(application["args"]).config
        options = actor_options(wanted)
        needs = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options.get("memory", 0)}
        (group,) = [g for g in groups if wanted.placement.items() <= g.get("labels", {}).items()]
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        has = {
            "CPU": float(group["rayStartParams"]["num-cpus"]),
            "GPU": float(limits.get("nvidia.com/gpu", 0)),
            "memory": amount(limits["memory"]) * 0.7,  # Ray leaves the rest to the object store and to itself
        }
        scale = wanted.replicas
        least, most = (scale.min, scale.max) if isinstance(scale, ReplicaRange) else (scale, scale)
        for name, n in needs.items():
            if n:
                assert int(has[name] // n) * group["maxReplicas"] >= most, (wanted.model, name)
                sums = used[group["groupName"]]
                sums[name] = sums.get(name, 0) + n * least
                assert sums[name] <= has[name] * max(1, group["minReplicas"]), (wanted.model, name)


def test_the_ingress_waits_longer_than_any_model_and_does_not_hold_back_events() -> None:
    (ingress,) = [m for m in MANIFESTS if m.kind == "Ingress"]
    settings = {k.rpartition("/")[2]: v for k, v in ingress.content["metadata"]["annotations"].items()}
    deadlines = [
        ModelArguments.model_validate(a["args"]).config.timeout
        for m in SERVICES
        for config in serve_configs(m.content["spec"]["serveConfigV2"])
        for a in config.content["applications"]
        if a["import_path"].endswith(":model")
    ]
    assert settings["proxy-buffering"] == "off"
    assert int(settings["proxy-read-timeout"]) > max(deadlines)
    assert settings["proxy-body-size"] == "32m"
    paths = [path["path"] for rule in ingress.content["spec"]["rules"] for path in rule["http"]["paths"]]
    assert "/v1" in paths
    assert not [path for path in paths if "/admin".startswith(path)]
