"""Two or more states of the project side by side, each behind a daemon of its own: what a change costs per request.

    python -m tests.benchmarks.overhead.compare before=../old after=. quiet=.,SAKURADITE_LOG_LEVEL=warning

Each argument is a name, a checkout and environment variables of its daemon. All daemons are up at once and asked in
turn, in another order every round, so that whatever else the machine does falls on all of them alike. Prints the
medians: milliseconds at one caller, requests per second at 16 and at 64, and microseconds of CPU per request that the
router's and the model's process took there. The latter move least on a machine that is not quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import httpx

from sakuradite.http.keys import read_admin_key
from tests.benchmarks.overhead.__main__ import API_KEY, CALLERS, free_port, wait_for
from tests.benchmarks.overhead.load import MODEL
from tests.cluster.processes import descendants, name

PROCESSES = {"router": ":Router", "model": ":Model"}
"""By what Ray calls the process."""


class Side:
    """A daemon of one checkout with the fake model loaded."""

    def __init__(self, spec: str) -> None:
        self.name, _, rest = spec.partition("=")
        checkout, *settings = rest.split(",")
        self._folder = Path(checkout).resolve()
        self._settings = dict(setting.split("=", 1) for setting in settings)

    def __enter__(self) -> Side:
        self._home = tempfile.TemporaryDirectory()
        self._port = free_port()
        environment = os.environ | {"PYTHONPATH": str(self._folder), "SAKURADITE_API_KEY": API_KEY} | self._settings
        self._daemon = subprocess.Popen(
            [sys.executable, "-m", "sakuradite", "--home", self._home.name, "serve", "--port", str(self._port)],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for(f"http://127.0.0.1:{self._port}/healthz")
            self._load()
        except BaseException:
            self.__exit__()
            raise
        names = {pid: name(pid) for pid in descendants(self._daemon.pid)}
        self._processes = {
            process: next(pid for pid, found in names.items() if mark in found) for process, mark in PROCESSES.items()
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._daemon.send_signal(signal.SIGINT)
        self._daemon.wait()
        self._home.cleanup()

    def _load(self) -> None:
        url = f"http://127.0.0.1:{self._port}/admin/v1"
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            client.headers["authorization"] = f"Bearer {read_admin_key(Path(self._home.name))}"
            operation = client.post("/models/load", json={"model": MODEL, "backend": "fake"}).json()
            while operation["status"] in ("pending", "running"):
                time.sleep(0.2)
                operation = client.get(f"/operations/{operation['id']}").json()
        assert operation["status"] == "succeeded", operation

    def ask(self, callers: int, seconds: float) -> dict[str, float]:
        """What `load` finds, and microseconds of CPU per request by process."""
        command = [sys.executable, "-m", "tests.benchmarks.overhead.load"]
        arguments = [str(self._port), str(callers), str(seconds), API_KEY, "unary"]
        before = self._cpu()
        found: dict[str, float] = json.loads(
            subprocess.run([*command, *arguments], capture_output=True, check=True).stdout
        )
        spent = {process: cpu - before[process] for process, cpu in self._cpu().items()}
        return found | {process: cpu / found["answered"] * 1e6 for process, cpu in spent.items()}

    def _cpu(self) -> dict[str, float]:
        return {process: cpu_seconds(pid) for process, pid in self._processes.items()}


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, the kernel's time for it included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sides", nargs="+", metavar="NAME=CHECKOUT[,VARIABLE=VALUE]...")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    found: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as up:
        sides = [up.enter_context(Side(spec)) for spec in arguments.sides]
        for side in sides:
            side.ask(CALLERS[-1], 1.0)
        for turn in range(arguments.rounds):
            for callers in CALLERS:
                for place in range(len(sides)):
                    side = sides[(turn + place) % len(sides)]
                    found[side.name, callers].append(side.ask(callers, arguments.seconds))
    print(f"{os.cpu_count()} cores, load average {before:.1f} before and {os.getloadavg()[0]:.1f} after\n")
    print("| | p50 ms, 1 | requests/s, 16 | CPU us of router, model | requests/s, 64 | CPU us of router, model |")
    print("|---|---|---|---|---|---|")
    for side in sides:

        def median(callers: int, figure: str, of: str = side.name) -> float:
            return statistics.median(one[figure] for one in found[of, callers])

        cells = [f"{median(1, 'p50_ms'):.2f}"]
        for callers in CALLERS[1:]:
            cells.append(f"{median(callers, 'per_second'):,.0f}")
            cells.append(f"{median(callers, 'router'):.0f}, {median(callers, 'model'):.0f}")
        print(f"| {side.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
