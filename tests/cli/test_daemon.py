"""The commands against a real daemon on a real Ray, as a new user meets them; and `run --local`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from sakuradite import Sakuradite
from tests.cli.conftest import QUESTIONS, Result

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
MODEL = "tiny/fake"


def command(*arguments: object, stdin: bytes = b"", **environment: str) -> Result:
    """Run the program as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "sakuradite", *map(str, arguments)],
        input=stdin,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


@dataclass
class Running:
    """A daemon and how to reach it."""

    process: subprocess.Popen[bytes]
    url: str
    key: str
    home: Path

    def cli(self, *arguments: object, stdin: bytes = b"") -> Result:
        options = ("--base-url", self.url, "--home", self.home)
        return command(*options, *arguments, stdin=stdin, SAKURADITE_ADMIN_KEY=self.key)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`sakuradite serve`, ended by Ctrl-C."""
    home = tmp_path_factory.mktemp("daemon")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = (home / "log").open("wb+")
    process = subprocess.Popen(
        [sys.executable, "-m", "sakuradite", "--home", str(home), "serve", "--port", str(port)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 120
        while b"listens on" not in (home / "log").read_bytes():
            assert process.poll() is None, (home / "log").read_text()
            assert time.monotonic() < end, (home / "log").read_text()
            time.sleep(0.2)
        key = (home / "admin.key").read_text().strip()
        yield Running(process, f"http://127.0.0.1:{port}", key, home)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, (home / "log").read_text()
        assert "Traceback" not in (home / "log").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def test_the_life_of_a_model(running: Running, questions: Path) -> None:
    assert running.cli("ps", "--json").json == []
    asked = ("run", MODEL, "-q", questions)
    first = running.cli(*asked, "--state", "x", "--backend", "fake")  # loads it
    assert first.code == 0, first.err
    assert list(first.json["answers"]) == list(QUESTIONS)
    assert running.cli(*asked, stdin=b"x").json == first.json  # resident as it is
    (status,) = running.cli("ps", "--json").json
    assert (status["model"], status["status"]) == (MODEL, "ready")
    other = running.cli("load", MODEL, "--backend", "fake", "--set", "max_batch_size=2")
    assert other.code == 1
    assert other.err.startswith("error: ")
    again = running.cli("load", MODEL, "--backend", "fake", "--json")
    assert again.json["status"] == "succeeded"
    assert running.cli("doctor").code == 0

    lines = b"".join(orjson.dumps(f"state {i}") + b"\n" for i in range(40))
    rows = [orjson.loads(row) for row in running.cli(*asked, "--jsonl", stdin=lines).out.splitlines()]
    assert [row["line"] for row in rows] == list(range(1, 41))

    with Sakuradite(MODEL, base_url=running.url) as client:
        assert client.decide("x", QUESTIONS).model_dump(mode="json") == first.json
        stream = client.decide("x", QUESTIONS, stream=True)
        assert [event.type for event in stream][-1] == "complete"
        assert stream.result.model_dump(mode="json") == first.json

    assert running.cli("unload", MODEL).out == f"{MODEL} is unloaded\n"
    gone = running.cli("ps", "--json")
    assert gone.json == []


def test_a_model_that_cannot_be_loaded_says_why(running: Running) -> None:
    failed = running.cli("load", "/nonexistent/checkpoint")
    assert failed.code == 1
    assert failed.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in failed.err


def test_a_second_daemon_at_the_same_port_is_one_line(running: Running, tmp_path: Path) -> None:
    port = running.url.rpartition(":")[2]
    second = command("--home", tmp_path / "other", "serve", "--port", port)
    assert second.code == 2
    assert second.err.startswith("error: ")
    assert port in second.err
    assert len(second.err.splitlines()) == 1


def test_run_local_needs_no_daemon(questions: Path, tmp_path: Path) -> None:
    asked = ("--home", tmp_path / "home", "run", "--local", MODEL, "--backend", "fake", "-q", questions)
    deep = tmp_path / ("d" * 60)  # too long for the Unix sockets that Ray makes below it
    deep.mkdir()
    done = command(*asked, stdin=b"x", SAKURADITE_BASE_URL="http://127.0.0.1:9", TMPDIR=str(deep))
    assert done.code == 0, done.err
    found: Any = done.json
    assert list(found["answers"]) == list(QUESTIONS)
    assert done.err == ""  # nothing of Ray's in the terminal


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_load_leaves_nothing_behind(questions: Path, tmp_path: Path, number: signal.Signals) -> None:
    mark = f"SAKURADITE_TEST_MARK={tmp_path.name}-{number.name}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sakuradite", "--home", str(tmp_path), "run", "--local", "tiny/fake?load=300"),
            *("--backend", "fake", "-q", str(questions), "--state", "x"),
        ],
        cwd=ROOT,
        env=os.environ | dict([mark.split("=")]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    end = time.monotonic() + 60
    while not any("ServeReplica" in line for line in marked(mark)):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.2)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode in ((130,) if number is signal.SIGINT else (143, -signal.SIGTERM))
    assert b"Traceback" not in err
    end = time.monotonic() + 30
    while left := marked(mark):
        assert time.monotonic() < end, left
        time.sleep(0.2)


def marked(mark: str) -> list[str]:
    """The command lines of the processes that have a variable in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
