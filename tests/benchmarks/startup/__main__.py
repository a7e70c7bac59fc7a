"""Print the time from process start to end: python -m tests.benchmarks.startup [RUNS]"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

CASES = {
    "python -c pass": ["-c", "pass"],
    "import sakuradite": ["-c", "import sakuradite"],
    "from sakuradite import Sakuradite": ["-c", "from sakuradite import Sakuradite"],
    "sakuradite --version": ["-m", "sakuradite", "--version"],
    "sakuradite --help": ["-m", "sakuradite", "--help"],
    "sakuradite ps (no daemon)": ["-m", "sakuradite", "--base-url", "http://127.0.0.1:9", "ps"],
}


def main(runs: int) -> None:
    """Each case `runs` times, interleaved, after one run to warm the disk; medians in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for run in range(runs + 1):
        for name, arguments in CASES.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
            if run:
                times[name].append(time.perf_counter() - began)
    base = statistics.median(times["python -c pass"])
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:36} {median * 1000:6.0f} ms   {(median - base) * 1000:6.0f} ms over bare Python")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
