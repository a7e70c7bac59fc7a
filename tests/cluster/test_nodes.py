"""A daemon on a cluster of several nodes: which node a replica runs on, and what is said when none can hold it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Daemon, start_daemon
from tests.cluster.nodes import Nodes
from tests.cluster.processes import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HEAD, GPUS, MLX = "127.0.0.1", "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def temp() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="skn", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes(temp: Path) -> Iterator[Nodes]:
    kinds: list[dict[str, Any]] = [
        {"num_cpus": 1, "labels": {"zone": "a"}},
        {"num_cpus": 4, "num_gpus": 2, "labels": {"zone": "b", "gpu": "h100"}},
        {"num_cpus": 2, "resources": {"MLX": 1}, "labels": {"zone": "b"}},
    ]
    with Nodes(temp / "ray", kinds) as running:
        yield running


@pytest.fixture(scope="module")
def daemon(nodes: Nodes, temp: Path) -> Iterator[Daemon]:
    running = start_daemon(temp / "home", address=nodes.address, environment=nodes.environment)
    yield running
    assert running.stop() == (0, "")


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ({"placement": {"zone": "a"}}, [HEAD]),
        ({"placement": {"zone": "b", "gpu": "!h100"}}, [MLX]),
        ({"placement": {"zone": "in(b, c)"}, "num_cpus": 3}, [GPUS]),
        ({"num_gpus": 1, "replicas": 2}, [GPUS, GPUS]),
        ({"num_gpus": 0.5, "num_cpus": 0.5, "replicas": 4}, [GPUS] * 4),
        ({"resources": {"MLX": 1}}, [MLX]),
        ({"num_cpus": 2, "replicas": 3}, [GPUS, GPUS, MLX]),
    ],
)
def test_replicas_run_where_their_labels_and_resources_are(
    config: dict[str, Any], places: list[str], daemon: Daemon, nodes: Nodes
) -> None:
    operation = daemon.load(model="fake-placed", **config)
    assert operation["status"] == "succeeded", operation
    assert eventually(lambda: nodes.replicas("model-fake-placed") == places), nodes.ask()
    assert daemon.decide("fake-placed").status_code == 200
    assert daemon.unload("fake-placed").status_code == 200


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"placement": {"zone": "c"}}, ["no such node", "zone=c", f"{HEAD} (zone=a)", f"{GPUS} (gpu=h100, zone=b)"]),
        ({"num_gpus": 3}, ["no node can hold a replica", "needed 1 CPU, 3 GPU", f"{GPUS} 4 CPU, 2 GPU"]),
        ({"num_cpus": 5}, ["needed 5 CPU", f"{HEAD} 1 CPU; {GPUS} 4 CPU; {MLX} 2 CPU"]),
        ({"num_gpus": 1, "placement": {"zone": "a"}}, ["zone=a", f"the nodes have {HEAD} 1 CPU, 0 GPU"]),
        ({"num_cpus": 2, "replicas": 4}, ["the nodes hold 3 of these replicas at most", "4 x (2 CPU)"]),
        ({"num_gpus": 1.5}, ["num_gpus is 1.5"]),
        ({"placement": {"zone": "-a-"}}, ["placement is no label selector"]),
    ],
)
def test_what_no_node_can_hold_is_said_at_once(config: dict[str, Any], words: list[str], daemon: Daemon) -> None:
    operation = daemon.load(model="fake-too-large", **config)
    assert operation["status"] == "failed", operation
    assert all(word in operation["error"]["message"] for word in words), operation["error"]
    assert "within" not in operation["error"]["message"], "nothing was waited for"
    daemon.unload("fake-too-large")


def test_what_others_hold_is_waited_for_and_then_told(daemon: Daemon, nodes: Nodes) -> None:
    """Six CPUs are free on the two workers together, and none of them has three."""
    for model, config in (("fake-one", {"num_cpus": 2, "num_gpus": 1}), ("fake-two", {"num_cpus": 1, "num_gpus": 1})):
        assert daemon.load(model=model, **config)["status"] == "succeeded"
    body = {"model": "fake-three", "backend": "fake", "num_cpus": 3}
    operation = daemon.admin("POST", "/models/load", json=body).json()["id"]
    seen: list[dict[str, Any]] = []

    def waits() -> bool:
        seen.append(daemon.admin("GET", f"/operations/{operation}").json()["progress"])
        return bool(seen[-1]["phase"] == "waiting")

    assert eventually(waits), seen
    assert "available" in seen[-1]["reason"]
    ended = daemon.wait(operation)
    assert ended["error"]["code"] == "insufficient_resources"
    assert f"needed 3 CPU, available {HEAD} 1 CPU; {GPUS} 1 CPU; {MLX} 2 CPU" in ended["error"]["message"]

    again = daemon.admin("POST", "/models/load", json=body).json()["id"]
    assert daemon.unload("fake-one").status_code == 200  # which gives back what the load waits for
    assert daemon.wait(again)["status"] == "succeeded"
    assert nodes.replicas("model-fake-three") == [GPUS]
    for model in ("fake-two", "fake-three"):
        assert daemon.unload(model).status_code == 200
