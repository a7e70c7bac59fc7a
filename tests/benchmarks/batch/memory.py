"""The memory of a bulk job over an input that is larger than what it may hold: driver, Ray and all replicas together.

python -m tests.benchmarks.batch.memory --rows 3000
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

from sakuradite import ModelConfig
from sakuradite.batch import run
from tests.cluster.processes import descendants

ROW_BYTES = 200_000
QUESTIONS = {"refund": {"type": "noul", "instructions": "The customer asks for a refund."}}


def main() -> None:
    """Print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=3000)
    rows = parser.parse_args().rows
    config = ModelConfig(model="fake", backend="fake", replicas=2, num_cpus=0, max_input_tokens=1 << 20)
    peak: dict[str, int] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.25):
            private = sum(_rollup(pid, "Private_Dirty") for pid in (os.getpid(), *descendants(os.getpid())))
            peak["private"] = max(peak.get("private", 0), private)
            peak["driver"] = max(peak.get("driver", 0), _rollup(os.getpid(), "Private_Dirty"))
            peak["shared"] = max(peak.get("shared", 0), _used("/dev/shm") - before)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "in.jsonl"
        with source.open("w") as file:
            file.writelines(f'{{"state": "{i} {"x" * ROW_BYTES}"}}\n' for i in range(rows))
        before = _used("/dev/shm")
        threading.Thread(target=watch, daemon=True).start()
        began = time.monotonic()
        summary = run(source, folder / "out.jsonl", QUESTIONS, config, home=folder, keep=[])
        ended.set()
        size = source.stat().st_size
        seconds = time.monotonic() - began
    words = ", ".join(f"{what} {count / 1e6:.0f} MB" for what, count in peak.items())
    print(f"{summary.rows} rows, {summary.errors} errors, input {size / 1e6:.0f} MB in {seconds:.0f} s")
    print(f"peaks: {words}; load {os.getloadavg()[0]:.1f}")


def _rollup(pid: int, field: str) -> int:
    """Bytes of a field of a process's memory; 0 where it has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _used(folder: str) -> int:
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


if __name__ == "__main__":
    main()
