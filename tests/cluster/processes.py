"""Looking at processes: who descends from whom, what listens where, what is left of a Ray. By /proc, so on Linux."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
LISTEN = "0A"


def descendants(pid: int) -> set[int]:
    """All living processes below one."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _parent(pid: str) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return None


def listeners(pids: set[int]) -> list[tuple[int, bool, int]]:
    """(process, whether on loopback, port) for each TCP socket that these processes listen on."""
    sockets: dict[str, tuple[bool, int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                address, port = fields[1].split(":")
                sockets[fields[9]] = address in LOOPBACK, int(port, 16)
    return [
        (pid, *sockets[link[8:-1]])
        for pid in pids
        for link in _links(pid)
        if link.startswith("socket:[") and link[8:-1] in sockets
    ]


def _links(pid: int) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def name(pid: int) -> str:
    """The command line as the process shows it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    return {pid for pid in pids if name(pid)}


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether the condition comes true within some time. Generous: this machine may be busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()
