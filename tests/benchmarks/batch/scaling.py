"""Rows per second of a bulk job over replicas of a model whose forward is a wait, so that cores are not the limit.

    python -m tests.benchmarks.batch.scaling --replicas 1 2 4 8
    python -m tests.benchmarks.batch.scaling --replicas 1 8 --handles     # the same through a client's Serve handles

The rate is that from 55 % to 90 % of the rows, when all replicas are up and none has run dry.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from sakuradite import ModelConfig, Sakuradite
from sakuradite.batch import Progress, run
from tests.batch.conftest import write_lines

LATENCY = 0.2  # seconds of a forward of 16 rows: a replica's limit is 80 rows/s
QUESTIONS = {"refund": {"type": "noul", "instructions": "The customer asks for a refund."}}
SECONDS = 24  # of work for each replica: on two cores eight processes need ten to start
MIDDLE = (0.55, 0.9)


def main() -> None:
    """Print a line for each number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--handles", action="store_true")
    given = parser.parse_args()
    print("| replicas | rows/s | of the limit | first row after, s | all, s | load |\n|---|---|---|---|---|---|")
    for replicas in given.replicas:
        rows = int(replicas * SECONDS * 16 / LATENCY)
        config = ModelConfig(
            model=f"fake?latency={LATENCY}", backend="fake", replicas=replicas, num_cpus=0, max_pending_requests=256
        )
        began = time.monotonic()
        seen = asyncio.run(_handles(config, rows)) if given.handles else _job(config, rows)
        low, high = (next((at, done) for at, done in seen if done >= share * rows) for share in MIDDLE)
        rate, limit = (high[1] - low[1]) / (high[0] - low[0]), replicas * 16 / LATENCY
        first, last = seen[0][0] - began, seen[-1][0] - began
        load = os.getloadavg()[0]
        print(f"| {replicas} | {rate:.0f} | {rate / limit:.0%} | {first:.1f} | {last:.1f} | {load:.1f} |", flush=True)


def _job(config: ModelConfig, rows: int) -> list[tuple[float, int]]:
    """When how many rows were done, by a bulk job."""
    seen: list[tuple[float, int]] = []

    def report(progress: Progress) -> None:
        if progress.phase == "deciding":
            seen.append((time.monotonic(), progress.done))

    with tempfile.TemporaryDirectory() as folder:
        source = write_lines(Path(folder) / "in.jsonl", *({"id": i, "state": f"ticket {i}"} for i in range(rows)))
        run(source, Path(folder) / "out.jsonl", QUESTIONS, config, home=Path(folder), report=report)
    return seen


async def _handles(config: ModelConfig, rows: int) -> list[tuple[float, int]]:
    """The same, by a client that calls a Serve deployment of as many replicas."""
    seen: list[tuple[float, int]] = []
    replicas = config.replicas
    assert isinstance(replicas, int)
    async with Sakuradite(config, base_url="") as client:
        states = (f"ticket {i}" for i in range(rows))
        done = 0
        async for _ in client.decide_many(states, QUESTIONS, concurrency=64 * replicas):
            done += 1
            seen.append((time.monotonic(), done))
    return seen


if __name__ == "__main__":
    main()
