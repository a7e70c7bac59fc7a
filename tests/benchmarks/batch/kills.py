"""A bulk job killed at random points until it is done, its output compared with an undisturbed run's, again and again.

python -m tests.benchmarks.batch.kills --kills 50
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from tests.batch.killing import Killing

PER_JOB = 6  # kills at most, before a job may come to its end


def main() -> None:
    """Kill, go on, compare; say how often and where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rows", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further job after so long")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills") as folder:
        killing = Killing(Path(folder), given.rows, given.seed)
        whole = killing.undisturbed()
        same = 0
        while (left := given.kills - killing.kills.total()) > 0 and time.monotonic() - began < given.seconds:
            same += killing.disturbed(min(left, PER_JOB)) == whole
            print(f"{killing.jobs} jobs, {same} the same, kills {dict(killing.kills)}", flush=True)
    print(f"{killing.kills.total()} kills, {killing.ended} ended a run, at parts {sorted(killing.parts_at_kills)}")
    print(f"{same} of {killing.jobs} outputs of {given.rows} rows are the same as undisturbed; seed {given.seed}")
    print(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")
    raise SystemExit(same != killing.jobs)


if __name__ == "__main__":
    main()
