"""How weights reach the nodes: a store on each, or one for all. And a router on each node that there is."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Daemon, start_daemon
from tests.cluster.nodes import Nodes
from tests.cluster.processes import eventually
from tests.hub.standin import StandIn

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HEAD, SECOND, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
MODEL = "org/tiny"
CONFIG: dict[str, Any] = {"model": MODEL, "backend": "torch", "device": "cpu"}


@pytest.fixture
def hub(tiny: Callable[..., Path]) -> Iterator[StandIn]:
    server = StandIn()
    server.add(MODEL, {path.name: path.read_bytes() for path in tiny("llama").iterdir() if path.is_file()})
    yield server
    server.close()


@pytest.fixture
def temp() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="sks", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def cluster(temp: Path, hub: StandIn, *homes: Path | None) -> Nodes:
    """A node per home, which SAKURADITE_HOME names there; the zones are a, b..."""
    nodes = [
        {"num_cpus": 4, "labels": {"zone": "ab"[number]}}
        | ({} if home is None else {"env_vars": {"SAKURADITE_HOME": str(home)}})
        for number, home in enumerate(homes)
    ]
    return Nodes(
        temp / "ray", nodes, HF_ENDPOINT=hub.endpoint, HF_HOME=str(temp / "hf"), HF_HUB_DISABLE_TELEMETRY="1",
        SAKURADITE_HOME="",
    )  # fmt: skip


def stored(home: Path) -> int:
    """How many whole checkpoints a home holds."""
    return len(list(home.glob("models/org--tiny/*/model.safetensors")))


def load(daemon: Daemon, zone: str, **more: Any) -> dict[str, Any]:
    return daemon.load(**{**CONFIG, "placement": {"zone": zone}, **more})


def test_each_node_downloads_once_what_it_runs(temp: Path, hub: StandIn) -> None:
    homes = [temp / "one", temp / "two"]
    with cluster(temp, hub, *homes) as nodes:
        daemon = start_daemon(temp / "home", address=nodes.address, routers="node", environment=nodes.environment)
        go = threading.Event()
        hub.before_send = lambda name: None if name != "model.safetensors" else (go.wait(60), None)[1]
        body = {**CONFIG, "placement": {"zone": "b"}, "replicas": 2}
        operation = daemon.admin("POST", "/models/load", json=body).json()["id"]
        seen: list[dict[str, Any]] = []

        def downloading() -> bool:
            seen.append(daemon.admin("GET", f"/operations/{operation}").json()["progress"])
            return bool(seen[-1]["phase"] == "downloading")

        assert eventually(downloading, 30), seen
        assert seen[-1]["bytes_done"] < seen[-1]["bytes_total"]
        go.set()
        loaded = daemon.wait(operation)
        assert loaded["status"] == "succeeded", loaded
        assert nodes.replicas("model-tiny") == [SECOND, SECOND]
        assert len(hub.downloads("model.safetensors")) == 1, "two replicas that start at once share one download"
        assert [stored(home) for home in homes] == [0, 1], "the head does not fetch what it will not run"
        assert daemon.decide(MODEL).status_code == 200
        assert daemon.unload(MODEL).status_code == 200
        assert load(daemon, "a")["status"] == "succeeded"
        assert len(hub.downloads("model.safetensors")) == 2
        assert [stored(home) for home in homes] == [1, 1]
        assert daemon.unload(MODEL).status_code == 200
        hub.seen.clear()
        assert load(daemon, "b")["status"] == "succeeded"
        assert hub.downloads("model.safetensors") == []
        assert daemon.unload(MODEL).status_code == 200

        assert daemon.admin("DELETE", "/models", params={"model": MODEL}).status_code == 200
        assert [stored(home) for home in homes] == [0, 0], "removed from all nodes"
        again = daemon.admin("DELETE", "/models", params={"model": MODEL})
        assert (again.status_code, again.json()["error"]["code"]) == (404, "model_not_found")

        failed = load(daemon, "b", model="/data/not-there")
        assert failed["error"]["code"] == "model_not_found"
        assert f"on node {SECOND}: '/data/not-there' looks like a path" in failed["error"]["message"]

        def routers() -> list[str]:
            places = nodes.ask()["sakuradite"]
            places.remove(HEAD)  # the catalog
            return places

        assert eventually(lambda: routers() == [HEAD, SECOND])
        nodes.ask('add {"num_cpus": 1}')
        assert eventually(lambda: routers() == [HEAD, SECOND, THIRD])
        nodes.ask(f"remove {THIRD}")
        assert eventually(lambda: routers() == [HEAD, SECOND])
        assert daemon.client.get("/healthz").status_code == 200
        assert daemon.stop() == (0, "")


def test_one_home_for_all_is_downloaded_to_once(temp: Path, hub: StandIn) -> None:
    with cluster(temp, hub, None, None) as nodes:
        daemon = start_daemon(temp / "shared", address=nodes.address, environment=nodes.environment)
        assert load(daemon, "b")["status"] == "succeeded"
        assert stored(temp / "shared") == 1
        assert daemon.unload(MODEL).status_code == 200
        assert load(daemon, "a")["status"] == "succeeded"
        assert len(hub.downloads("model.safetensors")) == 1
        assert daemon.unload(MODEL).status_code == 200
        assert daemon.admin("DELETE", "/models", params={"model": MODEL}).status_code == 200
        assert stored(temp / "shared") == 0
        assert daemon.stop() == (0, "")
