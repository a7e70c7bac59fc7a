"""What it is worth to send a request to the replica with the fewest tokens to compute: against Serve's fewest calls.

    python -m tests.benchmarks.balance [--seconds 15] [--replicas 2]

A model that takes 20 microseconds a token. One request in ten is 12,000 tokens long, the others some 200; they arrive
at random at `--load` of what the replicas can do, from one caller (router) or shared out among two. Then sixteen
callers that never stop, for the throughput. The order of the requests is the same for every way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sakuradite.cluster.balance import TokenQueues
from sakuradite.cluster.calls import ModelCalls
from sakuradite.cluster.embedded import EmbeddedModel
from sakuradite.cluster.handles import running_replicas
from sakuradite.config import ModelConfig
from sakuradite.records import Candidate, QuestionRecord, RequestRecord

SECONDS_PER_TOKEN = 20e-6
SMALL, LARGE, SHARE = 100, 12_000, 0.1
CALLERS = 16


def requests(seed: int) -> Any:
    """An endless row of requests, the same for the same seed."""
    draw = random.Random(seed)
    question = QuestionRecord("choice", ("Which?",), (Candidate("a", ("one",)), Candidate("b", ("two",))))
    while True:
        large = draw.random() < SHARE
        yield large, RequestRecord("r", ("x" * (LARGE if large else SMALL),), (question,))


async def timed(calls: ModelCalls, request: RequestRecord) -> float:
    begun = time.perf_counter()
    async for _ in calls.decide(request):
        pass
    return time.perf_counter() - begun


async def arriving(callers: list[ModelCalls], rate: float, seconds: float) -> dict[bool, list[float]]:
    """Times of small (False) and large (True) requests that arrive at random."""
    draw, line = random.Random(1), requests(2)
    tasks: list[tuple[bool, asyncio.Task[float]]] = []
    end = time.perf_counter() + seconds
    due = time.perf_counter()
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        large, request = next(line)
        tasks.append((large, asyncio.ensure_future(timed(callers[len(tasks) % len(callers)], request))))
        due += draw.expovariate(rate)
    found: dict[bool, list[float]] = {False: [], True: []}
    for large, task in tasks:
        found[large].append(await task)
    return found


async def saturated(callers: list[ModelCalls], seconds: float) -> float:
    """Requests per second of callers that ask one after another."""
    line, end, count = requests(3), time.perf_counter() + seconds, 0

    async def one(number: int) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await timed(callers[number % len(callers)], next(line)[1])
            count += 1

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(CALLERS)))
    return count / (time.perf_counter() - begun)


def cuts(times: list[float]) -> list[str]:
    """Median, p90 and p99 in milliseconds."""
    found = statistics.quantiles(times, n=100)
    return [f"{found[at - 1] * 1e3:.0f}" for at in (50, 90, 99)]


async def way(name: str, replicas: int, callers: int, load: float, seconds: float) -> str:
    """One row of the table."""
    config = ModelConfig(
        model=f"fake?token_latency={SECONDS_PER_TOKEN}", backend="fake", replicas=replicas, max_input_tokens=1 << 15,
        max_pending_requests=10_000,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as home:
        model = EmbeddedModel(config, Path(home))
        await model.start()
        lines = [ModelCalls(model._name, 120.0) for _ in range(callers)]
        for calls in lines:
            await calls.describe()
            await asyncio.sleep(2)
            assert len(running_replicas(calls._handle) or []) == replicas, "not all replicas are up"
        alone = [await timed(lines[0], next(requests(0))[1]) for _ in range(20)]
        mean = SHARE * LARGE * SECONDS_PER_TOKEN + (1 - SHARE) * statistics.median(alone)
        times = await arriving(lines, load * replicas / mean, seconds)
        many = await saturated(lines, seconds / 2)
        for calls in lines:
            await calls.close()
        await model.close()
    cells = [f"{statistics.mean(times[large]) * 1e3:.0f} | {' | '.join(cuts(times[large]))}" for large in (False, True)]
    return f"| {name} | {replicas} | {callers} | {' | '.join(cells)} | {many:.0f} |"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--replicas", type=int, nargs="*", default=[2])
    parser.add_argument("--load", type=float, default=0.7)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n")
    print(
        "| way | replicas | callers | small: mean ms | p50 | p90 | p99 | large: mean | p50 | p90 | p99 | at most, /s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    from ray import serve

    from sakuradite.cluster import local

    local.acquire()
    choose, deployment = TokenQueues.choose, serve.deployment

    def nobody(self: TokenQueues, replicas: Collection[str], tokens: float, avoid: str = "") -> str:
        return ""

    def undirected(*args: Any, **options: Any) -> Any:
        options.pop("request_router_config", None)
        return deployment(*args, **options)

    for replicas in arguments.replicas:
        for callers in (1, 2):
            serve.deployment, TokenQueues.choose = undirected, nobody  # type: ignore[method-assign]
            print(
                await way("Serve's: the better of two by calls", replicas, callers, arguments.load, arguments.seconds),
                flush=True,
            )
            serve.deployment, TokenQueues.choose = deployment, choose  # type: ignore[method-assign]
            print(await way("fewest tokens", replicas, callers, arguments.load, arguments.seconds), flush=True)
    local.release()


if __name__ == "__main__":
    asyncio.run(main())
