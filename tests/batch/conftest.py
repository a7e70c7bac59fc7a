"""A bulk job without Ray: the same reader, replica and writer, one after another in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic_core import to_json

from sakuradite.batch import Summary, job, pipeline, run
from sakuradite.batch.pipeline import Pool, Result, Work
from sakuradite.batch.replica import Replica
from sakuradite.cluster import resources
from sakuradite.config import ModelConfig

QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "The customer asks for a refund."},
    "team": {"type": "choice", "criteria": {"billing": "invoices", "shipping": None}},
    "urgency": {"type": "score", "criteria": ["can wait", "today", "now"]},
}
FAKE = ModelConfig(model="fake", backend="fake")


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replica]]:
    """`replicas(config, asked)` makes one in this process; all are ended with the test."""
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))  # a replica sets it; put back
    made: list[Replica] = []

    def replica(*arguments: Any) -> Replica:
        made.append(Replica(*arguments))
        return made[-1]

    yield replica
    for one in made:
        if one._failure is None:
            asyncio.run_coroutine_threadsafe(one._engine.stop(0), one._loop).result()
        one._loop.call_soon_threadsafe(one._loop.stop)
        one._thread.join()
        one._loop.close()


type Inline = Callable[[Work, Pool], Iterator[Result]]


@pytest.fixture
def inline(replicas: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch) -> Inline:
    """Jobs of this test run without Ray. What runs them, to be wrapped by tests that disturb it."""

    def run_inline(work: Work, pool: Pool) -> Iterator[Result]:
        replica = replicas(pool.config, pool.home, work.asked, pool.threads)
        for block in work.blocks():
            yield from pipeline._results(replica(block))

    monkeypatch.setattr(job, "run_pipeline", run_inline)
    monkeypatch.setattr(job, "_ray", lambda address: nullcontext())
    monkeypatch.setattr(resources, "check_resources", lambda config: {})
    return run_inline


def write_lines(path: Path, *values: Any) -> Path:
    """A .jsonl of some values; bytes stand as they are."""
    path.write_bytes(b"".join((v if isinstance(v, bytes) else to_json(v)) + b"\n" for v in values))
    return path


def read_lines(path: Path) -> list[Any]:
    """The values of a .jsonl."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def run_fake(source: Path, target: Path, **more: Any) -> Summary:
    """A job of the fake model."""
    return run(source, target, more.pop("questions", QUESTIONS), more.pop("model", FAKE), **more)
