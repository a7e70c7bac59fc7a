"""What each fault costs, measured: requests lost, the worst answer, the time until all is as before. One table.

    python -m tests.benchmarks.faults [--only NAME ...]

Seven callers (one with 60 questions a request) ask a model of 5 ms a batch on two replicas behind two routers, by the
SDK as it comes, `retries=0`. Every answer is compared with the expected one; a wrong one ends the run with exit code 1.
Needs Linux and some two minutes; `disk` needs root.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.cluster import scenarios
from tests.cluster.conftest import Daemon, start_daemon
from tests.cluster.load import Case, Report, table
from tests.cluster.scenarios import World, loaded

type Row = tuple[str, Report, str]

KILLED = {
    "replica": ("kill -9 a model replica", "Replica:model-"),
    "router": ("kill -9 a router", "Replica:sakuradite:Router"),
    "catalog": ("kill -9 the catalog", "Replica:sakuradite:Catalog"),
    "controller": ("kill -9 the Serve controller", "Controller"),
}


@contextmanager
def running(temp: Path, routers: int = 1) -> Iterator[Daemon]:
    daemon = start_daemon(temp / "home", routers=routers)
    try:
        yield daemon
    finally:
        daemon.stop()


def one_machine(temp: Path, answers: list[Case], wanted: Callable[[str], bool]) -> Iterator[Row]:
    """The faults of a daemon on a Ray of its own."""
    with running(temp, routers=2) as daemon:
        with loaded(daemon, answers) as world:
            for name, (title, deployment) in KILLED.items():
                if wanted(name):
                    yield title, *scenarios.killed(world, deployment)
            if wanted("network"):
                slow, others = scenarios.slow_network(world)
                yield "clients at 40 kB/s and 50 ms a block", slow, "those clients themselves"
                yield "the same", others, "the other clients"
        for name, model, more, scenario in (
            ("hung", "fake?hang=HANG&latency=0.005", {"timeout": 2, "max_batch_seconds": 3}, hung),
            ("hung", "fake?hang=HANG&latency=0.005", {"timeout": 60, "max_batch_seconds": 3}, hung_early),
            ("poison", "fake?crash=CRASH&latency=0.005", {}, poisoned),
            ("memory", "fake?oom_rows=3&latency=0.002", {}, out_of_memory),
        ):
            if wanted(name):
                with loaded(daemon, answers, model, **more) as world:
                    yield scenario(world)
        if wanted("frozen"):
            with loaded(daemon, answers, timeout=20) as world:
                yield "SIGSTOP a replica (as if off the network); deadline 20 s", *scenarios.frozen(world)


def hung(world: World) -> Row:
    responses: list[httpx.Response] = []
    report, remark = scenarios.hung(world, responses)
    return "a forward hangs; deadline 2 s, stuck after 3 s", report, f"it: {responses[0].status_code}; {remark}"


def hung_early(world: World) -> Row:
    responses: list[httpx.Response] = []
    report, remark = scenarios.hung(world, responses)
    return "a forward hangs; deadline 60 s, stuck after 3 s", report, f"it: {responses[0].status_code}; {remark}"


def poisoned(world: World) -> Row:
    responses: list[httpx.Response] = []
    report, remark = scenarios.poisoned(world, responses)
    codes = " and ".join(str(r.status_code) for r in responses)
    return "a request that ends its process, sent twice", report, f"it: {codes}, 3 replicas lost; {remark}"


def out_of_memory(world: World) -> Row:
    return "a batch does not fit the device", *scenarios.out_of_memory(world)


def full_disk(temp: Path, answers: list[Case]) -> Row:
    with (
        scenarios.small_disk(temp / "disk") as fill,
        running(temp / "disk") as daemon,
        loaded(daemon, answers) as world,
    ):
        return "the home's disk is full, and the catalog dies", *scenarios.full_disk(world, fill, {})


def node_lost(temp: Path, answers: list[Case]) -> Row:
    with scenarios.machines(temp, answers) as (world, nodes):
        return "kill -9 a worker node, all its processes", *scenarios.node_lost(world, nodes)


def main() -> int:
    names = [*KILLED, "network", "frozen", "hung", "poison", "memory", "disk", "node"]
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=names, default=names)
    chosen = arguments.parse_args().only
    answers = scenarios.known()
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)

    if set(chosen) - {"disk", "node"}:
        with tempfile.TemporaryDirectory() as temp:
            for row in one_machine(Path(temp), answers, lambda name: name in chosen):
                note(row)
    for name, scenario in (("disk", full_disk), ("node", node_lost)):
        if name in chosen:
            with tempfile.TemporaryDirectory(dir="/tmp", prefix="skf") as temp:
                note(scenario(Path(temp), answers))
    print(f"Load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs.\n\n{table(rows)}")
    return 1 if any(report.wrong for _, report, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
