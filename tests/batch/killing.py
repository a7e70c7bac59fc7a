"""A bulk job in processes of its own, killed at random points and gone on with until its output is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from tests.batch.conftest import QUESTIONS, write_lines
from tests.cluster.processes import descendants, name

ROOT = Path(__file__).parents[2]
WAYS = ("driver", "group", "all", "replica", "reader")
"""What is killed: the command alone, its process group, it with all of Ray, one replica, the reader."""
PROCESSES = {"replica": "ray::MapWorker(MapBatches(Replica))", "reader": "ray::MapWorker(ReadStream)"}
SECONDS = 240.0  # of one run, for a busy machine


@dataclass
class Killing:
    """Jobs over one input in a folder. `kills` counts what was done, `ended` how many runs a kill ended."""

    folder: Path
    rows: int
    seed: int
    model: str = "fake?latency=0.01"
    suffix: str = "jsonl"
    kills: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    jobs: int = 0
    parts_at_kills: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        rows = [{"id": i, "state": f"ticket {i}"} for i in range(self.rows)]
        self.source = write_lines(self.folder / "in.jsonl", *rows, b"{broken", {"id": "x", "state": 5})
        self.questions = self.folder / "questions.json"
        self.questions.write_bytes(orjson.dumps(QUESTIONS))

    def start(self, target: Path) -> subprocess.Popen[bytes]:
        """The command, in a process group of its own."""
        files = ["--home", self.folder, "batch", self.source, target, "-q", self.questions]
        options = ["-m", self.model, "--backend", "fake", "--replicas", "2", "--json"]
        return subprocess.Popen(
            [sys.executable, "-m", "sakuradite", *map(str, files), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def undisturbed(self) -> bytes:
        """The output of a run that nothing happens to."""
        target = self.folder / f"whole.{self.suffix}"
        began = time.monotonic()
        process = self.start(target)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 4, errors.decode()  # two rows of the input are wrong
        self.seconds = time.monotonic() - began
        return target.read_bytes()

    def disturbed(self, kills: int, ways: tuple[str, ...] = WAYS) -> bytes:
        """The output of a job that is killed so many times at most, and gone on with until it is done."""
        self.jobs += 1
        target = self.folder / f"out-{self.jobs}.{self.suffix}"
        left = kills
        while True:
            process = self.start(target)
            try:
                while left and self._kill_somewhen(process, target, self.chance.choice(ways)):
                    left -= 1
                _, errors = process.communicate(timeout=SECONDS)
            finally:
                if process.poll() is None:
                    process.kill()
            if process.returncode < 0:
                self.ended += 1
                if target.exists() and not _folder(target).exists():  # killed when there was nothing left to do
                    return target.read_bytes()
            else:
                assert process.returncode == 4, errors.decode()
                return target.read_bytes()

    def _kill_somewhen(self, process: subprocess.Popen[bytes], target: Path, way: str) -> bool:
        """Wait for a random moment, of time or of progress, and kill; False where the run came to its end before."""
        folder = _folder(target)
        begun = _parts(folder)
        by_progress = self.chance.random() < 0.7
        parts = begun + self.chance.randint(1, 12)
        end = time.monotonic() + (SECONDS if by_progress else self.chance.uniform(0, self.seconds * 1.1))
        while process.poll() is None and time.monotonic() < end and not (by_progress and _parts(folder) >= parts):
            time.sleep(0.01)
        if process.poll() is not None:
            return False
        return self._kill(process, way, _parts(folder))

    def _kill(self, process: subprocess.Popen[bytes], way: str, parts: int) -> bool:
        pid = process.pid
        below = descendants(pid)
        if way in PROCESSES:
            found = [child for child in below if name(child).startswith(PROCESSES[way])]
            if not found:
                way = "driver"  # nothing of that kind yet
            else:
                _end(self.chance.choice(found))
        if way == "driver":
            _end(pid)
        elif way == "group":
            os.killpg(pid, signal.SIGKILL)
        elif way == "all":
            for one in (pid, *below):
                _end(one)
        if way not in PROCESSES:
            process.wait(SECONDS)
        self.kills[way] += 1
        self.parts_at_kills.append(parts)
        return True


def _folder(target: Path) -> Path:
    return target.with_name(f"{target.name}.batch")


def _parts(folder: Path) -> int:
    try:
        return sum(entry.startswith("part-") for entry in os.listdir(folder))
    except FileNotFoundError:
        return 0


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
