"""Clusters that somebody else runs: a daemon that joins, Serve configs, an embedded client that is killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import SERVE, Daemon, run_python
from tests.cluster.processes import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CLUSTER = """
import json, logging, os, sys, time
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
import ray
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Own:
    def __call__(self, *_): return "mine"

ray.init(
    address="local", include_dashboard=False, log_to_driver=False, configure_logging=False, num_cpus=4,
    _node_ip_address="127.0.0.1",
)
logging.getLogger("ray.serve").setLevel(logging.ERROR)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Own.bind(), name="own", route_prefix="/own")
print(ray.get_runtime_context().gcs_address, flush=True)
for line in sys.stdin:
    if line.startswith("deploy "):
        import yaml
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema
        content = yaml.safe_load(open(line.split()[1]))
        del content["http_options"], content["proxy_location"]
        content["applications"].append({"name": "own", "route_prefix": "/own", "import_path": "tests.cluster.own:app"})
        _get_global_client().deploy_apps(ServeDeploySchema(**content))
    status = serve.status().applications
    print(json.dumps({name: str(app.status) for name, app in status.items()}), flush=True)
"""


class Cluster:
    """A Ray with Serve and an application of its own, in another process."""

    def __init__(self, environment: dict[str, str]) -> None:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        variables = {**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(self.port)],
            env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.environment = environment
        self.address = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str = "status") -> set[str]:
        """The names of Serve's applications."""
        import json

        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return set(json.loads(self._line()))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    environment = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback, and its address taken as it is
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "SAKURADITE_API_KEY": "inference-key",
        "SAKURADITE_ADMIN_KEY": "admin-key",
    }
    running = Cluster(environment)
    assert running.address
    yield running
    running.process.communicate(timeout=60)


def test_a_daemon_joins_a_cluster_and_leaves_others_alone(
    cluster: Cluster, daemons: Callable[..., Daemon], tmp_path: Path
) -> None:
    auth: dict[str, str | None] = {name: v for name, v in cluster.environment.items() if name.startswith("RAY")}
    daemon = daemons(address=cluster.address, environment=auth)
    assert daemon.load(model="fake-joined")["status"] == "succeeded"
    assert daemon.decide("fake-joined").status_code == 200
    names = cluster.ask()
    assert {"own", "sakuradite"} < names
    second = run_python(SERVE, repr({"home": str(tmp_path / "other"), "port": 0, "address": cluster.address,
                                     "max_request_bytes": 5}), **auth)  # fmt: skip
    out, errors = second.communicate(timeout=60)
    assert second.returncode == 1, out
    assert len(errors.splitlines()) == 1, errors
    assert daemon.url in errors
    assert "max_request_bytes 33554432 instead of 5" in errors
    assert daemon.stop(signal.SIGTERM) == (0, "")
    assert daemon.lines[2:] == ["Stopping; once more to stop at once."]
    assert cluster.ask() == {"own"}
    assert httpx.get(f"http://127.0.0.1:{cluster.port}/own", trust_env=False).text == "mine"


def test_a_serve_config_serves_router_and_models_behind_serves_proxy(cluster: Cluster) -> None:
    path = Path(__file__).parents[2] / "deployments" / "dry-run.yaml"
    cluster.ask(f"deploy {path}")
    with httpx.Client(base_url=f"http://127.0.0.1:{cluster.port}", trust_env=False, timeout=30) as client:

        def ready() -> bool:
            return client.get("/readyz").status_code == 200

        assert eventually(ready, 120)
        body = {"model": "jev-latest", "state": "x", "questions": {"q": {"type": "noul", "instructions": "y"}}}
        assert client.post("/v1/decisions", json=body).status_code == 401
        client.headers["authorization"] = "Bearer inference-key"
        answer = client.post("/v1/decisions", json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, "fake")
        client.headers["authorization"] = "Bearer admin-key"
        (shown,) = client.get("/admin/v1/models").json()
        assert (shown["model"], shown["status"], shown["replicas"]) == ("fake", "ready", {"target": 1, "ready": 1})
        for method, url, content in (
            ("POST", "/admin/v1/models/unload", {"model": "fake"}),
            ("POST", "/admin/v1/models/load", {"model": "fake", "backend": "fake"}),
        ):
            refused = client.request(method, url, json=content)
            assert (refused.status_code, "model-fake" in refused.text) == (409, True)


EMBEDDED = """
import asyncio, logging, sys
from pathlib import Path
import ray
from sakuradite.cluster.embedded import EmbeddedModel
from sakuradite.config import ModelConfig

async def main():
    await EmbeddedModel(ModelConfig(model="fake", backend="fake"), Path(sys.argv[2])).start()
    print("open", flush=True)
    await asyncio.sleep(600)

ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
asyncio.run(main())
"""


def test_a_killed_client_of_a_cluster_leaves_no_model_there(cluster: Cluster, tmp_path: Path) -> None:
    process = run_python(EMBEDDED, cluster.address, str(tmp_path), **cluster.environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    assert len(cluster.ask()) == 2
    process.kill()
    process.communicate()
    assert eventually(lambda: cluster.ask() == {"own"}, 90)
