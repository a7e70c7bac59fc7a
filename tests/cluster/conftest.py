"""One embedded Ray in this process and one daemon in another, for all tests of the cluster that do not end them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sakuradite.cluster import local
from sakuradite.http.keys import read_admin_key

ROOT = Path(__file__).parents[2]
SERVE = """
import sys
from pathlib import Path
from sakuradite.cluster.daemon import serve
from sakuradite.config import ServerConfig
from sakuradite.errors import SakuraditeError
if __name__ == "__main__":
    arguments = eval(sys.argv[1])
    restore = arguments.pop("restore", False)
    try:
        serve(ServerConfig(**arguments), restore)
    except SakuraditeError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
"""


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Keeps the Ray of this process between tests: a start takes seconds."""
    local.acquire()
    yield
    local.release()


def run_python(code: str, *arguments: str, **environment: str | None) -> subprocess.Popen[str]:
    """A Python of its own with this package, its output captured. A variable of None is taken away."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={name: value for name, value in variables.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass
class Daemon:
    """A running `sakuradite serve` and an administrator's view of it."""

    process: subprocess.Popen[str]
    lines: list[str]
    url: str = ""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False))

    def admin(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self.client.request(method, f"/admin/v1{path}", **arguments)

    def load(self, **config: Any) -> dict[str, Any]:
        """Load with the fake backend unless told otherwise; the operation when it has ended."""
        response = self.admin("POST", "/models/load", json={"backend": "fake", **config})
        assert response.status_code == 202, response.text
        return self.wait(response.json()["id"])

    def wait(self, operation: str, seconds: float = 60) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer: dict[str, Any] = self.admin("GET", f"/operations/{operation}").json()
            if answer["status"] not in ("pending", "running"):
                return answer
            time.sleep(0.1)
        raise AssertionError(f"{operation} has not ended: {answer}")

    def status(self, model: str) -> dict[str, Any] | None:
        found = [m for m in self.admin("GET", "/models").json() if m["model"] == model]
        return found[0] if found else None

    def unload(self, model: str) -> httpx.Response:
        return self.admin("POST", "/models/unload", json={"model": model})

    def decide(self, model: str, state: str = "x", **more: Any) -> httpx.Response:
        questions = {"q": {"type": "choice", "criteria": {"a": None, "b": None}}}
        return self.client.post("/v1/decisions", json={"model": model, "state": state, "questions": questions, **more})

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code and what it wrote to stderr."""
        self.process.send_signal(number)
        self.client.close()
        code = self.process.wait(60)
        assert self.process.stderr is not None
        assert self.process.stdout is not None
        errors = self.process.stderr.read()
        self.process.stderr.close()
        self.process.stdout.close()
        return code, errors


def start_daemon(home: Path, *, port: int = 0, environment: dict[str, str | None] | None = None, **more: Any) -> Daemon:
    """A daemon that listens. `more` are fields of ServerConfig, and `restore`."""
    settings = {"home": str(home), "port": port, **more}
    process = run_python(SERVE, repr(settings), **{"RAY_ADDRESS": None, **(environment or {})})
    daemon = Daemon(process, [])
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            daemon.lines.append(line.rstrip())
            arrived.put(line)
        arrived.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while line := arrived.get(timeout=90):
            if "Sakuradite listens" in line:
                break
        else:
            assert process.stderr is not None
            raise AssertionError(f"the daemon ended: {daemon.lines} {process.stderr.read()}")
    except BaseException:
        process.kill()
        raise
    daemon.url = line.split()[-1]
    key = read_admin_key(home)
    daemon.client = httpx.Client(
        base_url=daemon.url, headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=60
    )
    return daemon


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon that most tests share."""
    running = start_daemon(tmp_path_factory.mktemp("home"))
    yield running
    running.stop()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """`daemons()` starts one whose home is the test's; all are stopped at its end."""
    started: list[Daemon] = []

    def start(**more: Any) -> Daemon:
        started.append(start_daemon(more.pop("home", tmp_path / "home"), **more))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.stop()
