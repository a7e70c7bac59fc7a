"""Two machines with `ray start` on each, as the guide says: a daemon on one, a model on the other, routers on both."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Daemon, start_daemon
from tests.cluster.namespaces import Machine, allowed
from tests.cluster.nodes import ROOT
from tests.cluster.processes import descendants, eventually, name

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not allowed(), reason="needs Linux and the rights to make network namespaces, as root has"),
]

PORT, KEY = 6399, "inference-key"


class RayNode:
    """`ray start --block` on a machine."""

    def __init__(self, machine: Machine, environment: dict[str, str], *arguments: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        self.process = machine.start(
            [*command, f"--node-ip-address={machine.address}", *arguments],
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        """All of Ray there, at once: how it ends by itself takes 16 s, and is not what is tested here."""
        for pid in descendants(self.process.pid) | {self.process.pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


def test_a_model_on_the_second_machine_answers_on_both(stack: ExitStack) -> None:
    temp = Path(tempfile.mkdtemp(prefix="skm", dir="/tmp"))
    stack.callback(shutil.rmtree, temp, ignore_errors=True)
    first, second = Machine(), Machine()
    stack.callback(first.close)
    stack.callback(second.close)
    first.connect(second, "10.77.0.1", "10.77.0.2")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_TMPDIR": str(temp)}
    small = ("--object-store-memory=100000000", "--num-cpus=2")
    head = RayNode(
        first, token, "--head", f"--port={PORT}", "--labels=zone=a", "--include-dashboard=false", *small,
    )  # fmt: skip
    stack.callback(head.stop)

    assert eventually((temp / "ray" / "ray_current_cluster").exists)  # where `auto` looks; written last
    worker = RayNode(second, token, f"--address={first.address}:{PORT}", "--labels=zone=b", *small)
    stack.callback(worker.stop)
    environment: dict[str, str | None] = {**token}

    def serve() -> Daemon:
        return start_daemon(
            temp / "home", address="auto", host="0.0.0.0", api_key=KEY, routers="node", environment=environment
        )

    daemon = first.run(serve)
    stack.callback(lambda: daemon.process.poll() is None and daemon.stop())
    assert daemon.lines[-1].startswith("Sakuradite listens on every node, here on http://0.0.0.0:")
    port = int(daemon.url.rsplit(":", 1)[1])
    loaded = first.run(lambda: eventually_loaded(daemon, placement={"zone": "b"}))
    assert loaded["status"] == "succeeded", loaded
    assert model_runs_on(second)
    assert not model_runs_on(first)

    def decide() -> dict[str, httpx.Response]:
        body = {"model": "fake-far", "state": "x", "questions": {"q": {"type": "noul", "instructions": "y"}}}
        with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, trust_env=False, timeout=30) as client:
            return {
                machine.address: client.post(f"http://{machine.address}:{port}/v1/decisions", json=body)
                for machine in (first, second)
            }

    def both_listen() -> bool:
        try:
            return {answer.status_code for answer in first.run(decide).values()} == {200}
        except httpx.TransportError:
            return False  # the second machine's router is still being started

    assert eventually(both_listen)
    answers = first.run(decide)
    assert answers[first.address].json()["answers"] == answers[second.address].json()["answers"]
    refused = first.run(lambda: httpx.post(f"http://{second.address}:{port}/v1/decisions", json={}, trust_env=False))
    assert refused.status_code == 401
    code, _ = daemon.stop()  # Ray warns on stderr where other tests' Rays run on this machine
    assert code == 0


def eventually_loaded(daemon: Daemon, **config: Any) -> dict[str, Any]:
    """Loaded once the second machine has joined, which may be later than the daemon."""
    operation: dict[str, Any] = {}

    def done() -> bool:
        nonlocal operation
        operation = daemon.load(model="fake-far", **config)
        return bool(operation["status"] == "succeeded" or "no such node" not in operation["error"]["message"])

    eventually(done)
    return operation


def model_runs_on(machine: Machine) -> bool:
    """Whether a process of the model is in the machine's namespace."""
    here = machine.run(lambda: os.readlink("/proc/thread-self/ns/net"))
    for entry in os.listdir("/proc"):
        if entry.isdigit() and "model-fake-far" in name(int(entry)):
            try:
                if os.readlink(f"/proc/{entry}/ns/net") == here:
                    return True
            except OSError:
                continue  # it ended meanwhile
    return False
