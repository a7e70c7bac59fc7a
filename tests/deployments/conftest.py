"""A Ray that somebody else started, with keys and token in its environment, as on a machine or in a head pod."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.processes import eventually

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
API_KEY, ADMIN_KEY = "inference-key", "admin-key"
QUESTIONS = {"q": {"type": "choice", "criteria": {"a": None, "b": None}}}


@dataclass
class Head:
    """A head node with Ray's dashboard, and Serve's proxy on a port of its own once something is deployed."""

    folder: Path
    options: list[str]
    environment: dict[str, str]
    address: str
    dashboard: str
    port: int
    client: httpx.Client
    admin: httpx.Client
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, again too, and return when its GCS answers."""
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)  # of a head that died: Ray takes it for alive
        process = self._ray(*self.options)

        def up() -> bool:
            try:
                return httpx.get(f"{self.dashboard}/api/gcs_healthz", trust_env=False, timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        assert eventually(up, 60), (self.folder / "start.log").read_text()
        return process

    def add_worker(self, cpus: int) -> subprocess.Popen[bytes]:
        """One more node, on this machine."""
        (agent,) = free_ports(1)
        return self._ray(f"--address={self.address}", f"--num-cpus={cpus}", f"--dashboard-agent-listen-port={agent}")

    def _ray(self, *options: str) -> subprocess.Popen[bytes]:
        words = [str(SCRIPTS / "ray"), "start", "--block", "--node-ip-address=127.0.0.1",
                 "--object-store-memory=100000000", *options]  # fmt: skip
        with (self.folder / "start.log").open("ab") as log:
            process = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)
        self.started.append(process)
        return process

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One of Ray's commands or of ours, `serve deploy` say, as a user calls it."""
        program, *arguments = words
        start = [sys.executable, "-m", program] if program == "sakuradite" else [str(SCRIPTS / program)]
        return subprocess.run(
            [*start, *arguments], env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    def put(self, config: dict[str, Any]) -> httpx.Response:
        """Deploy a Serve config by Ray's REST API, as KubeRay does."""
        return httpx.put(f"{self.dashboard}/api/serve/applications/", json=config, headers=self.token, timeout=60,
                         trust_env=False)  # fmt: skip

    def details(self) -> dict[str, Any]:
        """What that API tells of the applications."""
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=self.token, timeout=30, trust_env=False)
        found: dict[str, Any] = answer.json()
        return found

    @property
    def token(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}

    def here(self, config: dict[str, Any]) -> dict[str, Any]:
        """The config with this head's address in place of its own."""
        return {**config, "http_options": {"host": "127.0.0.1", "port": self.port}}

    def decide(self, model: str) -> httpx.Response:
        return self.client.post("/v1/decisions", json={"model": model, "state": "x", "questions": QUESTIONS})

    def status(self, model: str) -> dict[str, Any] | None:
        """The model as `sakuradite ps` shows it."""
        found = [m for m in self.admin.get("/admin/v1/models").json() if m["model"] == model]
        return found[0] if found else None

    def becomes(self, model: str, **wanted: Any) -> dict[str, Any]:
        """Its status, once it is as wanted."""
        found: dict[str, Any] = {}

        def there() -> bool:
            nonlocal found
            found = self.status(model) or {}
            return all(found.get(key) == value for key, value in wanted.items())

        assert eventually(there, 90), found
        return found


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head with both keys in its environment. It stays empty until a test deploys something."""
    with start_head(tmp_path_factory.mktemp("home"), SAKURADITE_API_KEY=API_KEY, SAKURADITE_ADMIN_KEY=ADMIN_KEY) as it:
        yield it


@contextmanager
def start_head(home: Path, cpus: int = 8, **more: str) -> Iterator[Head]:
    """`ray start --head`, alone on loopback. `more` is put into its environment."""
    folder = Path(tempfile.mkdtemp(prefix="skh", dir="/tmp"))  # short: Ray's sockets are in it
    gcs, dashboard, agent, client, serve = free_ports(5)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "SAKURADITE_HOME": str(home),
    }
    for name in ("RAY_ADDRESS", "SAKURADITE_API_KEY", "SAKURADITE_ADMIN_KEY"):
        environment.pop(name, None)
    environment |= more
    options = [
        "--head", f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}", f"--num-cpus={cpus}",
        f"--temp-dir={folder}", "--disable-usage-stats",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{serve}"
    running = Head(
        folder, options, environment, f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", serve,
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {API_KEY}"}, trust_env=False, timeout=60),
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, trust_env=False, timeout=60),
    )  # fmt: skip
    try:
        running.start()
        yield running
    finally:
        running.client.close()
        running.admin.close()
        clear(folder)  # `ray stop` would end every Ray of the machine
        for process in running.started:
            process.wait(30)


def clear(folder: Path) -> None:
    """End what this Ray has left: its processes name the folder or have files in it open."""
    from sakuradite.cluster.watcher import users_of

    end = time.monotonic() + 20
    while (left := users_of(str(folder))) and time.monotonic() < end:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left


def load_config(path: Path) -> dict[str, Any]:
    """A Serve config of the repository."""
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found
