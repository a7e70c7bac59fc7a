"""A user's process and what it leaves: silence in the terminal, a Ray of the user's own, Ctrl-C, SIGTERM, kill -9."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import run_python
from tests.cluster.processes import alive, descendants, eventually, name

pytestmark = pytest.mark.ray

BEGIN = """
import asyncio, os, sys, time
from pathlib import Path
from sakuradite.cluster import local
from sakuradite.cluster.embedded import EmbeddedModel
from sakuradite.config import ModelConfig
from tests.cluster.asking import answers, request

def model(name="fake"):
    return EmbeddedModel(ModelConfig(model=name, backend="fake"), Path(sys.argv[1]))
"""

ONCE = (
    BEGIN
    + """
async def main():
    embedded = model()
    await embedded.start()
    print(sorted(await answers(embedded, request())))
    print(local.temp_directory())
    await embedded.close()
asyncio.run(main())
"""
)

UNDER_UV = f"""
import subprocess, sys
command = ["uv", "run", sys.executable, "-c", {ONCE!r}, sys.argv[1]]
sys.exit(subprocess.call(command, executable="/bin/sh", cwd=sys.argv[1]))
"""
"""`ONCE` below a process whose command line begins as `uv run`, by which Ray knows it; its shell runs `./run`."""

JOINED = (
    BEGIN
    + """
import ray
from ray import serve

def applications():
    return set(serve.status().applications)

async def main(others):
    first, second = model(), model()
    await first.start()
    await second.start()
    assert not local.is_last()
    assert len(applications() - others) == 2
    print(sorted(await answers(first, request())))
    await first.close()
    print(sorted(await answers(second, request(timeout=30))))
    await second.close()
    assert ray.is_initialized()
    assert applications() == others, applications()

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Own:
    def __call__(self): return "mine"

ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=4)
asyncio.run(main(set()))
handle = serve.run(Own.bind(), name="own", route_prefix=None)
asyncio.run(main({"own"}))
assert handle.remote().result() == "mine"
ray.shutdown()
"""
)

IMPORTED = (
    "import ray\n"
    + BEGIN
    + """
from tests.cluster.processes import descendants, listeners, name

async def main():
    embedded = model()
    await embedded.start()
    print(sorted(await answers(embedded, request())))
    outside = [pid for pid, loopback, _ in listeners(descendants(os.getpid())) if not loopback]
    print({name(pid).split(":")[2] for pid in outside})
    await embedded.close()
asyncio.run(main())
"""
)

TWICE = (
    BEGIN
    + """
async def main():
    for _ in range(2):
        embedded = model()
        await embedded.start()
        await answers(embedded, request())
        await embedded.close()
        assert not os.path.exists(local.temp_directory() or "")
asyncio.run(main())
import ray
ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False)
assert ray.get(ray.remote(lambda: 1).remote()) == 1
ray.shutdown()
print("own Ray")
"""
)

WAITING = (
    BEGIN
    + """
async def main():
    embedded = model("fake?latency=10")
    print("starting", flush=True)
    await embedded.start()
    print("running" if sys.argv[2] == "request" else "idle", flush=True)
    await (answers(embedded, request()) if sys.argv[2] == "request" else asyncio.sleep(600))
asyncio.run(main())
"""
)


def run(code: str, home: Path, **environment: str | None) -> tuple[int, str, str]:
    process = run_python(code, str(home), **environment)
    out, errors = process.communicate(timeout=240)
    return process.returncode, out, errors


def test_the_terminal_is_silent_whatever_the_environment_says(tmp_path: Path) -> None:
    """One start under everything that has led others astray: cases 49, 60 and 62."""
    long = tmp_path / ("long" * 16)
    long.mkdir()
    (tmp_path / "run").write_text('"$@"\nexit $?\n')
    code, out, errors = run(
        UNDER_UV,
        tmp_path,
        RAY_ADDRESS="192.0.2.1:6379",
        RAY_AUTH_MODE="disabled",
        http_proxy="http://127.0.0.1:9",
        HTTP_PROXY="http://127.0.0.1:9",
        ALL_PROXY="socks5://127.0.0.1:9",
        RAY_RUNTIME_ENV_HOOK="ray._private.runtime_env.uv_runtime_env_hook.hook",
        TMPDIR=str(long),
        PYTHONWARNINGS="error::DeprecationWarning:sakuradite",
    )
    assert (code, errors) == (0, "")
    rows, folder = out.splitlines()
    assert rows == "[0, 1, 2]"
    assert not Path(folder).exists()
    assert list(long.iterdir()) == []


@pytest.mark.slow
def test_a_program_that_imported_ray_before_is_as_safe_as_any(tmp_path: Path) -> None:
    """Ray reads part of its environment when it is imported: authentication, and where to listen."""
    code, out, errors = run(IMPORTED, tmp_path)
    assert (code, errors) == (0, "")
    assert out.splitlines() == ["[0, 1, 2]", "{'ServeReplica'}"]  # their gRPC, which asks for the token


@pytest.mark.slow
def test_a_ray_of_the_users_own_is_joined_and_left_running(tmp_path: Path) -> None:
    code, out, errors = run(JOINED, tmp_path)
    assert (code, out) == (0, "[0, 1, 2]\n" * 4), errors


@pytest.mark.slow
def test_open_close_open_and_then_a_ray_of_the_users_own(tmp_path: Path) -> None:
    code, out, errors = run(TWICE, tmp_path)
    assert (code, out) == (0, "own Ray\n"), errors
    assert errors.startswith("Token authentication is enabled")  # what Ray says of the user's own start, and no more
    assert len(errors.splitlines()) == 1


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path) -> None:
    both = [run_python(ONCE, str(tmp_path)) for _ in range(2)]
    ends = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [errors for _, errors in ends] == ["", ""]
    folders = {out.splitlines()[1] for out, _ in ends}
    assert len(folders) == 2


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """A folder for TMPDIR, short enough to be used, so that leftovers can be seen."""
    folder = Path("/tmp") / f"t{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def started(moment: str, home: Path, temporary: Path) -> subprocess.Popen[str]:
    process = run_python(WAITING, str(home), moment, TMPDIR=str(temporary))
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    if moment == "start":
        assert eventually(lambda: any("raylet" in name(pid) for pid in descendants(process.pid)))
    else:
        assert process.stdout.readline() in ("running\n", "idle\n")
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("start", signal.SIGINT),
        ("start", signal.SIGKILL),
        ("request", signal.SIGINT),
        ("request", signal.SIGTERM),
        ("idle", signal.SIGKILL),
    ],
)
def test_a_signal_leaves_nothing_behind(moment: str, number: signal.Signals, tmp_path: Path, temporary: Path) -> None:
    process = started(moment, tmp_path, temporary)
    own = descendants(process.pid)
    assert len(own) > 3
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (-number, 130)
    assert "Traceback" not in errors or number == signal.SIGINT  # Python's own, of KeyboardInterrupt
    assert "ray" not in errors.lower() or number == signal.SIGINT, errors
    assert eventually(lambda: not alive(own), 90), [name(pid) for pid in alive(own)]
    assert eventually(lambda: list(temporary.iterdir()) == []), list(temporary.iterdir())
