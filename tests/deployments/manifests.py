"""Kubernetes manifests as the tests read them, and the schemas that they must satisfy to the last key."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from sakuradite.cluster.declaration import _Loader

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster-configs" / "kuberay"
FILES = sorted(FOLDER.glob("*.yaml"))
RAY = ("RayService", "RayCluster")
KINDS = (*RAY, "Secret", "PersistentVolumeClaim", "Service", "PodDisruptionBudget", "StatefulSet", "Ingress")


@dataclass(frozen=True)
class Manifest:
    """One document of a file."""

    file: str
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content["kind"])

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])

    @property
    def id(self) -> str:
        return f"{self.file}:{self.kind}:{self.name}"

    @property
    def cluster(self) -> dict[str, Any]:
        """The RayCluster's spec in it."""
        spec: dict[str, Any] = self.content["spec"]
        found: dict[str, Any] = spec["rayClusterConfig"] if self.kind == "RayService" else spec
        return found

    def pods(self) -> list[dict[str, Any]]:
        """Its pod templates: for a cluster the head's first."""
        if self.kind in RAY:
            groups = [self.cluster["headGroupSpec"], *self.cluster["workerGroupSpecs"]]
            return [group["template"] for group in groups]
        return [self.content["spec"]["template"]] if self.kind == "StatefulSet" else []

    def containers(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each pod template with each container of it."""
        for pod in self.pods():
            for container in pod["spec"]["containers"]:
                yield pod, container


def read(text: str, file: str = "") -> list[Manifest]:
    return [Manifest(file, document) for document in yaml.load_all(text, _Loader)]


MANIFESTS = [manifest for path in FILES for manifest in read(path.read_text(), path.name)]


def each(manifests: list[Manifest]) -> list[Any]:
    """The manifests as parameters of a test, named."""
    return [pytest.param(manifest, id=manifest.id) for manifest in manifests]


@cache
def crd(kind: str) -> dict[str, Any]:
    """The schema of KubeRay's custom resource; unknown fields are refused in it."""
    packed = Path(__file__).parent / "kuberay" / f"{kind.lower()}.v1.schema.json.gz"
    schema: dict[str, Any] = orjson.loads(gzip.decompress(packed.read_bytes()))
    return schema


def closed(**properties: Any) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


@cache
def schema(kind: str) -> dict[str, Any]:
    """The schema of a kind. What KubeRay's schema embeds of Kubernetes serves for Kubernetes' own kinds; the rest is
    those fields of the API that are used here.
    """
    service = crd("RayService")["properties"]["spec"]["properties"]
    if kind in RAY:
        whole = {**crd(kind), "required": ["apiVersion", "kind", "metadata", "spec"]}
        properties = {**whole["properties"], "metadata": service["serveService"]["properties"]["metadata"]}
        return {**whole, "properties": properties}
    template = service["rayClusterConfig"]["properties"]["headGroupSpec"]["properties"]["template"]
    volume = template["properties"]["spec"]["properties"]["volumes"]["items"]["properties"]
    claim = volume["ephemeral"]["properties"]["volumeClaimTemplate"]["properties"]["spec"]
    spread = template["properties"]["spec"]["properties"]["topologySpreadConstraints"]["items"]["properties"]
    selector = spread["labelSelector"]
    text, number, texts = {"type": "string"}, {"type": "integer"}, {"additionalProperties": {"type": "string"}}
    metadata = service["serveService"]["properties"]["metadata"]
    backend = closed(service=closed(name=text, port=closed(number=number, name=text)))
    path = closed(path=text, pathType={"enum": ["Exact", "Prefix"]}, backend=backend)
    rule = closed(host=text, http=closed(paths={"type": "array", "items": path}))
    tls = closed(hosts={"type": "array", "items": text}, secretName=text)
    specs = {
        "Secret": ("v1", {"type": {"const": "Opaque"}, "stringData": {"type": "object", **texts}}),
        "PersistentVolumeClaim": ("v1", {"spec": claim}),
        "Service": ("v1", {"spec": service["serveService"]["properties"]["spec"]}),
        "PodDisruptionBudget": ("policy/v1", {"spec": closed(minAvailable=number, selector=selector)}),
        "StatefulSet": (
            "apps/v1",
            {
                "spec": closed(
                    serviceName=text,
                    replicas=number,
                    selector=selector,
                    template=template,
                    volumeClaimTemplates={"type": "array", "items": closed(metadata=metadata, spec=claim)},
                )
            },
        ),
        "Ingress": (
            "networking.k8s.io/v1",
            {
                "spec": closed(
                    ingressClassName=text,
                    tls={"type": "array", "items": tls},
                    rules={"type": "array", "items": rule},
                )
            },
        ),
    }
    version, more = specs[kind]
    made = closed(apiVersion={"const": version}, kind={"const": kind}, metadata=metadata, **more)
    return {**made, "required": list(made["properties"])}


@cache
def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(schema(kind))


def faults(content: dict[str, Any]) -> list[str]:
    """What the schema of its kind says against a manifest."""
    kind = content.get("kind")
    if kind not in KINDS:
        return [f"unknown kind {kind!r}"]
    return [f"{error.json_path}: {error.message}" for error in validator(kind).iter_errors(content)]
