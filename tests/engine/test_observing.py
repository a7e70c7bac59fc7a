"""What an observer of the engine is told: the tokens of every batch add up, every request ends once with its code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sakuradite.config import ModelConfig
from sakuradite.engine.compile import Compiler
from sakuradite.engine.engine import Engine
from sakuradite.engine.fake import FakeTokenizer
from sakuradite.engine.observing import Account, Batch
from sakuradite.errors import APIError
from sakuradite.questions import Noul, question_record
from sakuradite.records import RequestRecord

QUESTIONS = tuple(question_record(Noul(instructions="Late? " * count)) for count in (1, 2, 5))


class Spy:
    """Remembers all of it."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.compilations: list[int] = []
        self.halves = 0
        self.ends: list[tuple[str, Account]] = []

    def compiled(self, requests: int, seconds: float) -> None:
        assert seconds >= 0
        self.compilations.append(requests)

    def forwarded(self, batch: Batch) -> None:
        self.batches.append(batch)

    def halved(self) -> None:
        self.halves += 1

    def ended(self, request: RequestRecord, account: Account) -> None:
        self.ends.append((request.id, account))


@asynccontextmanager
async def spied(options: str = "", **settings: Any) -> AsyncIterator[tuple[Engine, Spy]]:
    spy = Spy()
    engine = Engine(ModelConfig(model=f"fake?{options}", backend="fake", **settings), None, observer=spy)
    await engine.start()
    yield engine, spy
    await engine.stop(drain=5)
    assert engine.pending_questions == 0


async def ask(engine: Engine, id_: str = "r", **fields: Any) -> None:
    async for _ in engine.decide(
        RequestRecord(id_, ("The parcel. " * 20,), fields.pop("questions", QUESTIONS), **fields)
    ):
        pass


@pytest.mark.parametrize("layout", ["packed", "cloned", "padded"])
async def test_the_tokens_of_a_batch_add_up(layout: str) -> None:
    """Against the prompts as they are: what the cost model of each layout computes, pads and saves."""
    compiler = Compiler(FakeTokenizer(), "fake", 8192)
    plan = compiler.compile([RequestRecord("r", ("The parcel. " * 20,), QUESTIONS)])[0]
    assert not isinstance(plan, APIError)
    prefix, head = len(plan.questions[0].prefix.tokens), len(compiler.head)
    suffixes = [len(question.rows[0].suffix) for question in plan.questions]
    whole = sum(question.input_tokens for question in plan.questions)
    async with spied(f"layout={layout}") as (engine, spy):
        await ask(engine)
    assert sum(batch.rows for batch in spy.batches) == 3
    assert sum(batch.prompt_tokens for batch in spy.batches) == whole == 3 * prefix + sum(suffixes)
    saved = sum(batch.saved_tokens for batch in spy.batches)
    if layout == "padded":
        assert saved == 0
    else:
        assert saved == 2 * prefix + head  # the state once, the head not at all
    padding = sum(batch.padding_tokens for batch in spy.batches)
    if layout == "packed":
        assert padding == 0
    for batch in spy.batches:
        assert batch.computed_tokens == batch.prompt_tokens - batch.saved_tokens + batch.padding_tokens
    if layout == "cloned" and len(spy.batches) == 1:
        assert padding == 3 * max(suffixes) - sum(suffixes) > 0


async def test_a_request_has_its_steps_in_order() -> None:
    async with spied("latency=0.02", max_batch_size=2) as (engine, spy):
        await ask(engine)
    ((id_, account),) = spy.ends
    assert (id_, account.code) == ("r", "")
    assert account.admitted <= account.compiling <= account.compiled <= account.batches[0].started
    assert account.batches == spy.batches
    assert [batch.rows for batch in account.batches] == [2, 1]
    assert all(batch.seconds >= 0.02 for batch in account.batches)
    assert account.ended >= account.batches[-1].started + account.batches[-1].seconds
    assert account.waited == account.batches[0].started - account.admitted
    assert spy.compilations == [1]
    assert account.input_tokens == sum(batch.prompt_tokens for batch in spy.batches)


async def test_what_fails_says_its_code_and_what_is_given_up_says_so() -> None:
    async with spied("latency=0.3", max_pending_requests=1, max_questions=3) as (engine, spy):
        with pytest.raises(APIError):
            await ask(engine, "crowded", questions=QUESTIONS * 2)
        first = asyncio.create_task(ask(engine, "first"))
        await asyncio.sleep(0.05)
        assert engine.pending_questions == 3
        with pytest.raises(APIError):
            await ask(engine, "second")
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(APIError):
            await ask(engine, "late", timeout=0.01)
    assert [(id_, account.code) for id_, account in spy.ends] == [
        ("crowded", "validation_error"),
        ("second", "capacity_exceeded"),
        ("first", "cancelled"),
        ("late", "request_timeout"),
    ]
    assert spy.ends[0][1].waited is None


async def test_a_batch_that_does_not_fit_is_told() -> None:
    async with spied("oom_rows=1") as (engine, spy):
        await ask(engine)
    assert spy.halves > 0
    assert sum(batch.rows for batch in spy.batches) == 3
