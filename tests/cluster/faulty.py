"""Ways to hurt a cluster: processes killed or frozen, by what they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from tests.cluster.processes import descendants, name


def serving(root: int, deployment: str) -> list[int]:
    """The processes below `root` of `Replica:application:deployment` (or its beginning), or of the `Controller`."""
    return sorted(p for p in descendants(root) if name(p).startswith(f"ray::Serve{deployment}"))


def node_of(root: int, address: str) -> set[int]:
    """All processes of a Ray node below `root`: its raylet with workers and agents, its GCS if it is the head."""
    below = descendants(root)
    named = {p for p in below if name(p).startswith("/") and any(a == address for a in _addresses(name(p)))}
    found = {p for p in named if "raylet/raylet" in name(p).split()[0] or "gcs_server" in name(p).split()[0]}
    return found | {q for p in found for q in descendants(p)}


def _addresses(command: str) -> list[str]:
    return [
        part.partition("=")[2]
        for part in command.split()
        if part.startswith(("--node_ip_address=", "--node-ip-address="))
    ]


def part_of_ray(root: int, program: str) -> int:
    """The `gcs_server` or the `raylet` below `root`."""
    (found,) = [p for p in descendants(root) if name(p).split(" ")[0].endswith(f"/{program}")]
    return found


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """All at once; one that has gone meanwhile is as good as killed."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
