"""A full load with churn for many minutes: does memory stay flat, do descriptors, are all answers right, is 429 said.

    python -m tests.benchmarks.soak [--minutes 30] [--pause 0]

A daemon with two routers; a model of 5 ms a batch on two replicas, which hold 32 requests each. Twelve callers with
small requests and two with 60 questions check every answer. Beside them a second model is loaded, asked and unloaded,
streams are left, requests given up, eleven kinds of bad ones sent, streams read at 64 bytes a second, heads never
finished, and 200 requests at once thrown every 20 s. Prints a report; the exit code is 1 when a bound is broken.
`--pause` seconds between the requests of a caller make it milder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.soak.churn import Met, Place, floods, leavers, nonsense, second_model, slow_readers
from tests.benchmarks.soak.memory import MiB, Trend, Watch
from tests.cluster import scenarios
from tests.cluster.conftest import start_daemon
from tests.cluster.load import Report

P99_SECONDS = 1.0
"""Of small requests while large ones run; one that waits for nobody takes 0.01 s."""
MAX_PENDING = 32


@dataclass
class Outcome:
    """What a run showed."""

    minutes: float
    report: Report
    met: Met
    trends: list[Trend]
    p99: tuple[float, float] = field(init=False)
    """Of small requests, in seconds: the first half of the run, and the second."""
    large_p99: float = field(init=False)

    def __post_init__(self) -> None:
        ok = [s for s in self.report.samples if s.outcome == "ok"]
        small = [s for s in ok if s.kind == "small"]
        middle = (small[0].start + small[-1].end) / 2
        halves = [s.seconds for s in small if s.end < middle], [s.seconds for s in small if s.end >= middle]
        self.p99 = p99(halves[0]), p99(halves[1])
        self.large_p99 = p99([s.seconds for s in ok if s.kind == "large"])

    @property
    def broken(self) -> list[str]:
        """The bounds that do not hold."""
        lost = {code: n for code, n in self.report.lost.items() if code != "capacity_exceeded"}
        return [
            *(trend.broken for trend in self.trends if trend.broken),
            *self.met.wrong[:5],
            *([f"{len(self.report.wrong)} wrong answers"] if self.report.wrong else []),
            *([f"requests lost: {lost}"] if lost else []),
            *([f"p99 of small requests is {max(self.p99):.2f} s"] if max(self.p99) > P99_SECONDS else []),
            *(["no flood was refused: the queue has no bound"] if not self.met.counts["429 in floods"] else []),
        ]

    def __str__(self) -> str:
        ok = sum(s.outcome == "ok" for s in self.report.samples)
        lines = [
            f"{self.minutes:.1f} minutes, load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs.",
            f"{ok:,} answers, all compared; wrong: {len(self.report.wrong)}; 429: "
            f"{self.report.lost['capacity_exceeded']}.",
            f"p99 of small requests {self.p99[0] * 1000:.0f} ms in the first half, {self.p99[1] * 1000:.0f} ms in the "
            f"second; of large ones {self.large_p99 * 1000:.0f} ms.",
            "Met: " + ", ".join(f"{n:,} x {what}" for what, n in sorted(self.met.counts.items())) + ".",
            "",
            "| process | memory, start | end | per hour | descriptors |",
            "|---|---|---|---|---|",
            *(
                f"| {t.name} | {t.first / MiB:.1f} MiB | {t.last / MiB:.1f} MiB | {t.per_hour / MiB:+.1f} MiB "
                f"| {t.descriptors[0]} to {t.descriptors[1]} |"
                for t in self.trends
            ),
            "",
            *(f"BROKEN: {what}" for what in self.broken),
        ]
        return "\n".join(lines)


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98] if len(seconds) > 1 else 0.0


def soak(minutes: float, home: Path, pause: float = 0.0, look: float = 5.0) -> Outcome:
    """Run it. `look` seconds lie between looks at the processes."""
    daemon = start_daemon(home, routers=2)
    try:
        answers = scenarios.known()
        with scenarios.loaded(daemon, answers, max_pending_requests=MAX_PENDING) as world:
            met, watch = Met(), Watch(daemon.process.pid)
            place = Place(daemon.url, {"authorization": daemon.client.headers["authorization"]}, world.model, met)
            end = time.monotonic() + minutes * 60
            with world.load(small=12, large=2, pause=pause) as load:
                churning = threading.Thread(target=lambda: asyncio.run(_churn(place, end)))
                churning.start()
                while time.monotonic() < end:
                    watch.look()
                    time.sleep(look)
                trends = watch.trends()
                churning.join()
            return Outcome(minutes, load.report(), met, trends)
    finally:
        daemon.stop()


async def _churn(place: Place, end: float) -> None:
    kinds = (second_model, leavers, nonsense, slow_readers, floods)
    tasks = {kind.__name__: asyncio.ensure_future(kind(place)) for kind in kinds}
    await asyncio.wait(tasks.values(), timeout=end - time.monotonic(), return_when=asyncio.FIRST_EXCEPTION)
    for name, task in tasks.items():
        if task.done() and not task.cancelled():
            place.met.wrong.append(f"{name} ended: {task.exception()!r}")
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=30.0)
    arguments.add_argument("--pause", type=float, default=0.0)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as home:
        outcome = soak(chosen.minutes, Path(home), chosen.pause)
    print(outcome)
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
