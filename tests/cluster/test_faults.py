"""Faults under load: whatever dies, hangs or fills up, no answer is wrong, and with two of each none is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from sakuradite.config import ModelConfig
from tests.cluster import scenarios
from tests.cluster.conftest import ROOT, SERVE, Daemon, start_daemon
from tests.cluster.faulty import kill, part_of_ray, serving
from tests.cluster.load import Case, Load, cases
from tests.cluster.processes import alive, descendants, eventually
from tests.cluster.scenarios import loaded

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def known() -> list[Case]:
    return scenarios.known()


@pytest.fixture(scope="module")
def two_routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    running = start_daemon(tmp_path_factory.mktemp("home"), routers=2)
    yield running
    running.stop()


@pytest.mark.slow
def test_a_replica_and_a_router_killed_cost_no_request(two_routers: Daemon, known: list[Case]) -> None:
    with loaded(two_routers, known) as world:
        routers = serving(world.root, "Replica:sakuradite:Router")
        before = world.replicas()

        def whole() -> bool:
            return len(set(world.replicas()) - {before[0]}) == 2

        report, _ = scenarios.struck(world, lambda: kill([before[0], routers[0]]), whole, after=0)
    assert not report.wrong
    assert not report.lost
    assert report.answered_after > 100
    assert len(set(serving(two_routers.process.pid, "Replica:sakuradite:Router")) - {routers[0]}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["Replica:sakuradite:Catalog", "Controller"])
def test_decisions_need_neither_catalog_nor_controller(deployment: str, two_routers: Daemon, known: list[Case]) -> None:
    with loaded(two_routers, known) as world:
        report, _ = scenarios.killed(world, deployment)
    assert not report.wrong
    assert not report.lost


@pytest.mark.slow
def test_a_real_checkpoint_loses_a_replica(two_routers: Daemon, tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    config = ModelConfig(model=str(folder), backend="torch", device="cpu", dtype="float32")
    real = cases(config, folder, small=6, large=1)
    with loaded(
        two_routers, real, str(folder), backend="torch", device="cpu", dtype="float32", tolerance=1e-5
    ) as world:
        report, _ = scenarios.killed(world, "Replica:model-")
    assert not report.wrong
    assert not report.lost


@pytest.mark.slow
def test_a_hung_forward_is_504_and_its_replica_replaced(two_routers: Daemon, known: list[Case]) -> None:
    answers: list[httpx.Response] = []
    with loaded(two_routers, known, "fake?hang=HANG&latency=0.005", timeout=2, max_batch_seconds=3) as world:
        report, _ = scenarios.hung(world, answers)
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    assert not report.wrong
    assert set(report.lost) <= {"request_timeout"}  # who was behind it when it hung, or was sent there until it ended
    assert report.answered_after > 100


@pytest.mark.slow
def test_a_request_that_ends_processes_is_refused_and_costs_nobody_an_answer(
    two_routers: Daemon, known: list[Case]
) -> None:
    answers: list[httpx.Response] = []
    with loaded(two_routers, known, "fake?crash=CRASH&latency=0.005") as world:
        report, _ = scenarios.poisoned(world, answers)
    assert [a.json()["error"]["code"] for a in answers] == ["inference_failed"] * 2
    assert not report.wrong
    assert not report.lost


@pytest.mark.slow
def test_batches_too_large_for_the_device_change_no_answer(two_routers: Daemon, known: list[Case]) -> None:
    with loaded(two_routers, known, "fake?oom_rows=3&latency=0.002") as world:
        report, _ = scenarios.out_of_memory(world)
    assert not report.wrong
    assert not report.lost


@pytest.mark.slow
def test_clients_on_a_slow_network_hold_nobody_up(two_routers: Daemon, known: list[Case]) -> None:
    with loaded(two_routers, known) as world:
        slow, others = scenarios.slow_network(world)
    for report in (slow, others):
        assert not report.wrong
        assert not report.lost


@pytest.mark.slow
def test_a_full_disk_refuses_what_is_new_and_spoils_nothing(tmp_path: Path, known: list[Case]) -> None:
    if not scenarios.may_mount():
        pytest.fail("needs root, to mount a small disk: run the slow tests as root")
    statuses: dict[str, int] = {}
    with scenarios.small_disk(tmp_path / "disk") as fill:
        daemon = start_daemon(tmp_path / "disk" / "home")
        try:
            with loaded(daemon, known) as world:
                report, _ = scenarios.full_disk(world, fill, statuses)
        finally:
            daemon.stop()
    assert statuses == {"before": 200, "full": 507, "full, new catalog": 507, "after": 200}
    assert not report.wrong
    assert not report.lost


@pytest.mark.slow
def test_a_worker_node_lost_costs_no_request(known: list[Case]) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="skf") as temp,
        scenarios.machines(Path(temp), known) as (world, nodes),
    ):
        report, _ = scenarios.node_lost(world, nodes)
    assert not report.wrong
    assert not report.lost


@pytest.mark.slow
@pytest.mark.parametrize("program", ["gcs_server", "raylet"])
def test_a_daemon_whose_ray_has_died_says_so_and_ends(program: str, daemons: Callable[..., Daemon]) -> None:
    daemon = daemons()
    own = descendants(daemon.process.pid)
    kill([part_of_ray(daemon.process.pid, program)])
    daemon.process.wait(30)
    code, errors = daemon.stop()
    assert code == 1
    assert "Ray has ended: its GCS or its raylet is gone." in errors, errors
    assert eventually(lambda: not alive(own), 20)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "moment"), [(signal.SIGTERM, "listens"), (signal.SIGINT, "Starting")])
def test_a_signal_to_the_whole_process_group_ends_all_of_it_soon(
    number: signal.Signals, moment: str, tmp_path: Path
) -> None:
    """As Ctrl-C in a terminal does, or systemd without KillMode=mixed: Ray gets it too."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, repr({"home": str(tmp_path), "port": 0})],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    while moment not in process.stdout.readline():
        assert process.poll() is None
    if moment == "Starting":
        assert eventually(lambda: len(descendants(process.pid)) > 2)
        time.sleep(1)
    own = descendants(process.pid)
    os.killpg(process.pid, number)
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, out + errors  # after a minute in vain Ray would abort it
    assert out.startswith("Stopping")
    assert "Traceback" not in errors
    assert eventually(lambda: not alive(own), 20)


FORKS = """
import os, signal
early = []  # registered before asyncio registers what closes its descriptor to the child
os.register_at_fork(after_in_child=lambda: [os.kill(os.getpid(), number) for number in early])
from pathlib import Path
from sakuradite.cluster.daemon import serve
from sakuradite.config import ServerConfig

def say(line):
    print(line, flush=True)
    if line.startswith("Starting"):
        early.append(signal.SIGINT)
        child = os.fork()
        if child == 0:
            os._exit(0)
        early.clear()
        assert os.waitpid(child, 0)[1] == 0

serve(ServerConfig(home=Path({home!r}), port=0), say=say)
"""


@pytest.mark.slow
def test_a_signal_to_a_child_that_is_not_its_program_yet_is_not_ours(tmp_path: Path) -> None:
    """It has our descriptors until then: asyncio would hear of its signal, and take ours for the second."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS.format(home=str(tmp_path))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Starting")
    assert "listens" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, out + errors
    assert out == "Stopping; once more to stop at once.\n"


@pytest.mark.slow
def test_the_load_sees_a_wrong_answer_and_the_scenarios_find_their_processes(daemon: Daemon, known: list[Case]) -> None:
    """Otherwise none of the tests here could fail."""
    spoilt = [replace(case, answers={**case.answers, "q0": {}}) for case in known]
    daemon.load(model="fake-spoilt")
    with Load(daemon.url, "fake-spoilt", spoilt) as load:
        assert eventually(lambda: len(load.samples) > 5)
    daemon.unload("fake-spoilt")
    assert {sample.outcome for sample in load.samples} == {"WRONG"}
    assert len(serving(daemon.process.pid, "Replica:sakuradite:Router")) == 1
    assert len(serving(daemon.process.pid, "Controller")) == 1
