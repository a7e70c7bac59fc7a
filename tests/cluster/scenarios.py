"""Each fault once, under a load whose every answer is known: for tests, which assert, and for the table of figures.

A scenario gives what the load saw and a remark on how things became whole again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sakuradite.config import ModelConfig
from tests.cluster.conftest import Daemon, start_daemon
from tests.cluster.faulty import kill, node_of, serving
from tests.cluster.load import Case, Load, Report, cases
from tests.cluster.nodes import Nodes
from tests.cluster.processes import eventually
from tests.cluster.slow import SlowNetwork

MODEL = "fake?latency=0.005"
type Seen = tuple[Report, str]


def known() -> list[Case]:
    """Requests with the answers of the fake model; its options change none."""
    return cases(ModelConfig(model="fake", backend="fake"))


@dataclass
class World:
    """A daemon with a model on two replicas, below the process `root`."""

    daemon: Daemon
    known: list[Case]
    root: int
    model: str = MODEL
    tolerance: float = 0.0

    def load(self, **more: Any) -> Load:
        return Load(self.daemon.url, self.model, self.known, tolerance=self.tolerance, **more)

    def replicas(self) -> list[int]:
        return [p for p in serving(self.root, "Replica:model-") if p not in self.others]

    def __post_init__(self) -> None:
        self.others = set(serving(self.root, "Replica:model-"))
        """Replicas of models that were there before."""


@contextmanager
def loaded(daemon: Daemon, answers: list[Case], model: str = MODEL, **config: Any) -> Iterator[World]:
    """A world whose model is loaded for as long as it is used."""
    tolerance = config.pop("tolerance", 0.0)
    world = World(daemon, answers, config.pop("root", daemon.process.pid), model, tolerance)
    # Half a CPU each, so that a third has room on two CPUs: a frozen process keeps what it holds.
    operation = daemon.load(model=model, **{"replicas": 2, "num_cpus": 0.5, **config})
    assert operation["status"] == "succeeded", operation
    yield world
    daemon.unload(model)


def struck(world: World, strike: Callable[[], object], whole: Callable[[], bool], after: float = 2.0) -> Seen:
    """A fault after a second of load; how long until `whole`, and some seconds more of load."""
    with world.load() as load:
        assert load.wait_for(50), load.report().lost
        load.fault()
        strike()
        begun = time.monotonic()
        assert eventually(whole, 120), "it did not become whole again"
        back = time.monotonic() - begun
        assert load.wait_for(50), load.report().lost
        time.sleep(after)
    return load.report(), f"replaced after {back:.1f} s"


def killed(world: World, deployment: str, after: float = 2.0) -> Seen:
    """kill -9 one process of a deployment (`Replica:application:deployment`, its beginning), or the `Controller`."""
    before = serving(world.root, deployment)

    def whole() -> bool:
        now = serving(world.root, deployment)
        return before[0] not in now and len(now) == len(before)

    return struck(world, lambda: kill(before[:1]), whole, after)


def frozen(world: World) -> Seen:
    """SIGSTOP a replica: its connections stay open and nothing comes back, as from a machine off the network."""
    before = world.replicas()

    def whole() -> bool:
        return len(set(world.replicas()) - {before[0]}) == len(before)

    try:
        return struck(world, lambda: kill(before[:1], signal.SIGSTOP), whole)
    finally:
        kill(before[:1])  # Ray asks it to end, which it cannot hear


def hung(world: World, answers: list[httpx.Response]) -> Seen:
    """A forward that never returns. `answers` gets that of the request that hangs."""
    before = world.replicas()
    asking = threading.Thread(target=lambda: answers.append(world.daemon.decide(world.model, "HANG")))

    def whole() -> bool:
        return len(set(before) & set(world.replicas())) == 1 and len(world.replicas()) == 2

    seen = struck(world, asking.start, whole)
    asking.join()
    return seen


def poisoned(world: World, answers: list[httpx.Response]) -> Seen:
    """A request that ends every process that reads it, as one that the machine's memory is too small for. Twice."""
    before = set(world.replicas())

    def strike() -> None:
        answers.extend(world.daemon.decide(world.model, "CRASH") for _ in range(2))

    def whole() -> bool:
        return not before & set(world.replicas()) and len(world.replicas()) == 2

    return struck(world, strike, whole)


def out_of_memory(world: World) -> Seen:
    """Batches that do not fit the device are halved; nobody sees it."""
    with world.load(small=12, large=4) as load:
        load.wait_for(400)
    return load.report(), "batches are halved"


def slow_network(world: World, rate: float = 40_000, delay: float = 0.05) -> tuple[Report, Report]:
    """Half of the clients behind a slow network; the reports of those behind it, and of the others."""
    with SlowNetwork(int(world.daemon.url.rsplit(":", 1)[1]), rate, delay) as network:
        slow = Load(network.url, world.model, world.known, small=4, large=2, tolerance=world.tolerance)
        with slow, world.load() as load:
            assert slow.wait_for(20), slow.report().lost
            assert load.wait_for(200)
    return slow.report(), load.report()


@contextmanager
def small_disk(folder: Path, size: int = 1 << 20) -> Iterator[Callable[[bool], None]]:
    """A disk of its own at `folder` (needs root). What is yielded fills it to the last byte, or empties it again."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)], check=True)
    ballast = folder / "ballast"

    def fill(full: bool) -> None:
        if not full:
            ballast.unlink()
            return
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 512)
            except OSError:
                return

    try:
        yield fill
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def may_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


def full_disk(world: World, fill: Callable[[bool], None], statuses: dict[str, int]) -> Seen:
    """The home's disk is full, and the catalog dies meanwhile. `statuses` gets what administration answered."""
    daemon = world.daemon

    def alias(name: str) -> int:
        return daemon.admin("PUT", f"/aliases/{name}", json={"model": world.model}).status_code

    with world.load() as load:
        load.wait_for(50)
        statuses["before"] = alias("before")
        load.fault()
        fill(True)
        statuses["full"] = alias("full")
        before = serving(world.root, "Replica:sakuradite:Catalog")
        kill(before)
        assert eventually(lambda: bool(set(serving(world.root, "Replica:sakuradite:Catalog")) - set(before)))
        statuses["full, new catalog"] = alias("full")
        names = {a["alias"] for a in daemon.admin("GET", "/aliases").json()}
        assert names == {"before"}, names
        load.wait_for(50)
        fill(False)
        statuses["after"] = alias("after")
        load.wait_for(50)
    return load.report(), "the books are whole, 507 meanwhile"


@contextmanager
def machines(temp: Path, answers: list[Case], workers: int = 3, **environment: str) -> Iterator[tuple[World, Nodes]]:
    """A daemon on a head without work and workers for one replica each; two of them have one."""
    kinds = [{"num_cpus": 0}, *[{"num_cpus": 1}] * workers]
    with Nodes(temp / "ray", kinds, **environment) as nodes:
        daemon = start_daemon(temp / "home", address=nodes.address, environment=nodes.environment, routers=2)
        try:
            with loaded(daemon, answers, root=nodes.process.pid, num_cpus=1) as world:
                yield world, nodes
        finally:
            daemon.stop()


def node_lost(world: World, nodes: Nodes) -> Seen:
    """kill -9 every process of a node that has a replica."""
    lost = node_of(world.root, nodes.replicas("model-")[0])
    replicas = set(world.replicas())
    assert len(lost) > 2
    assert len(lost & replicas) == 1

    def whole() -> bool:
        now = set(world.replicas())
        return len(now) == 2 and not now & lost

    return struck(world, lambda: kill(lost), whole)
