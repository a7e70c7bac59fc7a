"""Memory and descriptors of processes over time, and whether they are flat."""

from __future__ import annotations

import os
import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.processes import descendants, name

MiB = 1 << 20
WARM_UP = 0.4  # of the run: allocators, caches and pools fill; what grows after that is a leak
GROWTH_BYTES = 16 * MiB
GROWTH_SHARE = 0.04
"""A process may grow by so much, and so much of itself, over what is left after the warm-up."""
MORE_DESCRIPTORS = 24


@dataclass
class Trace:
    """One process: (seconds, bytes of anonymous memory, open descriptors), oldest first."""

    name: str
    points: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Trend:
    """A process over the measured part of a run."""

    name: str
    first: float
    last: float
    per_hour: float
    """Bytes at its beginning and end by a straight line through all points, and that line's slope."""
    descriptors: tuple[int, int]
    """The most in the first and in the last third."""

    @property
    def broken(self) -> str | None:
        """What is wrong with it, or None."""
        growth = self.last - self.first
        if growth > GROWTH_BYTES + GROWTH_SHARE * self.first:
            return f"{self.name} grew by {growth / MiB:.0f} MiB, from {self.first / MiB:.0f} MiB"
        if self.descriptors[1] > self.descriptors[0] + MORE_DESCRIPTORS:
            return f"{self.name} went from {self.descriptors[0]} to {self.descriptors[1]} descriptors"
        return None


class Watch:
    """Looks at all processes below one."""

    def __init__(self, root: int) -> None:
        self.traces: dict[int, Trace] = {}
        self._root, self._begun = root, time.monotonic()

    def look(self) -> None:
        at = time.monotonic() - self._begun
        for pid in {self._root, *descendants(self._root)}:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue  # it has ended
            if (found := re.search(r"RssAnon:\s+(\d+) kB", status)) is None:
                continue  # it is ending
            trace = self.traces.setdefault(pid, Trace(short(name(pid))))
            trace.points.append((at, int(found[1]) << 10, descriptors))

    def trends(self) -> list[Trend]:
        """Of the processes that lived through all of the measured part, the fastest growing first."""
        end = time.monotonic() - self._begun
        begin = WARM_UP * end
        found = []
        for trace in self.traces.values():
            points = [p for p in trace.points if p[0] >= begin]
            if len(points) < 6 or trace.points[0][0] > begin or points[-1][0] < end - (end - begin) / 4:
                continue
            slope, start = statistics.linear_regression([p[0] for p in points], [p[1] for p in points])
            third = len(points) // 3
            most = max(p[2] for p in points[:third]), max(p[2] for p in points[-third:])
            first, last = start + slope * points[0][0], start + slope * points[-1][0]
            found.append(Trend(trace.name, first, last, slope * 3600, most))
        return sorted(found, key=lambda trend: -trend.per_hour)


def short(command: str) -> str:
    """A process's name for the table."""
    if command.startswith("ray::"):
        return re.sub(r"\..*", "", command.removeprefix("ray::").split()[0])
    words = [Path(word).name for word in command.split()[:4] if not word.startswith("-")]
    if words and words[0].startswith("python"):
        return words[1] if len(words) > 1 and words[1].endswith(".py") else "sakuradite serve"
    return words[0] if words else "?"
