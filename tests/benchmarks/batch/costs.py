"""What a bulk job costs besides the model: reading, keeping, writing, and Ray Data's own price of a part.

python -m tests.benchmarks.batch.costs
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sakuradite.batch.folder import Folder
from sakuradite.batch.job import _pool, _ray
from sakuradite.batch.manifest import layout, made_from
from sakuradite.batch.output import Output
from sakuradite.batch.pipeline import Work, run
from sakuradite.batch.replica import Asked
from sakuradite.batch.source import Source
from sakuradite.client.request import check_questions
from sakuradite.config import ModelConfig
from tests.batch.conftest import write_lines

ROWS = 100_000
STATE = "I was charged twice this month and nobody answers my letters. " * 15  # a row of about 1 KB
QUESTIONS: dict[str, Any] = {"refund": {"type": "noul", "instructions": "The customer asks for a refund."}}
FIELDS = (
    b'{"model":"fake","answers":{"refund":{"type":"noul","noul":0.5329861202036033,"x_label_mass":0.900000017446}},'
    b'"usage":{"input_tokens":1200,"output_tokens":0}}'
)
PART_ROWS = 100
PARTS = 1000


def timed(what: str, count: int, unit: str, work: Callable[[], object]) -> None:
    """Print how many of a unit per second some work does."""
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    print(f"| {what} | {count / seconds:,.0f} {unit}/s | {1e6 * seconds / count:,.0f} us |", flush=True)


def main() -> None:
    """Print a table."""
    checked, _ = check_questions(QUESTIONS)
    config = ModelConfig(model="fake", backend="fake", replicas=2, num_cpus=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Source(write_lines(folder / "in.jsonl", *({"id": i, "state": STATE} for i in range(ROWS))))
        size = source.path.stat().st_size / ROWS
        print(f"rows of {size:.0f} bytes\n| | rate | each |\n|---|---|---|")
        target = folder / "out.jsonl"
        timed("digest of the input", ROWS, "rows", lambda: made_from(source, QUESTIONS, config, "state", False))
        timed("count of its rows", ROWS, "rows", lambda: layout(source, target, checked, None))
        work = Work(source, PART_ROWS, Asked(QUESTIONS, "state"))
        timed("reader: parts as blocks", ROWS, "rows", lambda: [block.nbytes for block in work.blocks()])
        kept = Folder(target)
        kept.open(restart=False)
        kept.begin({})

        def keep() -> None:
            for i in range(ROWS // PART_ROWS):
                kept.add(i, [FIELDS] * PART_ROWS, 0, 0)

        timed(f"driver: keep a part of {PART_ROWS} rows", ROWS // PART_ROWS, "parts", keep)
        for suffix in ("jsonl", "csv", "parquet"):
            columns = None if suffix == "jsonl" else {"id": "int", "state": "text"}
            output = Output(source, folder / f"out.{suffix}", checked, None, columns)  # type: ignore[arg-type]
            write = partial(output.write, kept.output)
            timed(f"driver: write .{suffix}", ROWS, "rows", lambda out=write: out(kept.lines(), ROWS))  # type: ignore[misc]
        kept.remove()
        small = Source(write_lines(folder / "small.jsonl", *({"state": "a"} for _ in range(PARTS))))
        with _ray(None):
            pool = _pool(config, folder, True, PARTS)
            results = run(Work(small, 1, Asked(QUESTIONS, "state")), pool)
            next(results)
            timed("Ray Data: a part of one short row, two replicas", PARTS - 1, "parts", lambda: list(results))
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
