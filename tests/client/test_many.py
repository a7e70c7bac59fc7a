"""Many states: order, errors as values, bounded reading ahead, early exit; sync and async."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from sakuradite import ClosedError, DecisionResult, Sakuradite, TransportError, ValidationError
from sakuradite.errors import ConfigurationError, ErrorRecord, InferenceFailedError
from sakuradite.records import Outcome, RequestRecord, RowFailure
from tests.client.conftest import QUESTIONS
from tests.client.test_decide import forever, wait_until
from tests.http.serving import MODEL, Served, even


def state_of(request: RequestRecord) -> str:
    return str(request.state[0])


async def slowest_first(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
    """Later states are answered sooner; a state that says "fail" fails."""
    state = state_of(request)
    if state == "fail":
        yield [RowFailure(0, ErrorRecord("inference_failed", 500, "no"))]
    await asyncio.sleep(0.05 if state.endswith("0") else 0)
    yield [even(request, i) for i in range(len(request.questions))]


def test_results_come_in_order_with_errors_as_values(scripted: Callable[..., Served]) -> None:
    served = scripted(slowest_first)
    bad: Any = object()
    states = ["0", "1", "fail", {"a": float("nan")}, bad, "5"]
    with Sakuradite(MODEL, base_url=served.url) as client:
        rows = list(client.decide_many(states, QUESTIONS, concurrency=3))
    kinds = [DecisionResult, DecisionResult, InferenceFailedError, ValidationError, ValidationError, DecisionResult]
    assert [type(row) for row in rows] == kinds
    assert "state" in str(rows[3])


def test_many_equals_one_by_one(server: Served) -> None:
    states = [f"state {i}" for i in range(50)]
    with Sakuradite(MODEL, base_url=server.url) as client:
        many = list(client.decide_many(states, QUESTIONS))
        assert many == [client.decide(state, QUESTIONS) for state in states]


async def test_many_in_coroutines(server: Served) -> None:
    async def states() -> AsyncIterator[str]:
        for i in range(30):
            yield f"state {i}"

    async with Sakuradite(MODEL, base_url=server.url) as client:
        rows = [row async for row in client.decide_many(states(), QUESTIONS)]
        again = [row async for row in client.decide_many((f"state {i}" for i in range(30)), QUESTIONS)]
    assert len(rows) == 30
    assert rows == again


async def test_the_bare_object_gives_what_its_loop_needs(server: Served) -> None:
    client = Sakuradite(MODEL, base_url=server.url)
    rows = [row async for row in client.decide_many(["a", "b"], QUESTIONS)]
    assert await asyncio.to_thread(lambda: list(client.decide_many(["a", "b"], QUESTIONS))) == rows
    await client.close()


def test_endless_states_are_read_no_further_than_the_window(server: Served) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"state {taken}"

    with Sakuradite(MODEL, base_url=server.url) as client:
        rows = client.decide_many(endless(), QUESTIONS, concurrency=4)
        for read in range(1, 40):
            assert isinstance(next(rows), DecisionResult)
            assert taken <= read + 2 * 4
        rows.close()


async def test_endless_states_are_read_no_further_in_coroutines(server: Served) -> None:
    taken = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"state {taken}"

    async with Sakuradite(MODEL, base_url=server.url) as client:
        rows = client.decide_many(endless(), QUESTIONS, concurrency=4)
        for read in range(1, 40):
            assert isinstance(await anext(rows), DecisionResult)
            assert taken <= read + 2 * 4 + 1  # one is awaited while the window is full
        await rows.aclose()


async def test_rows_left_at_any_moment_leave_no_coroutine_behind(server: Served) -> None:
    async with Sakuradite(MODEL, base_url=server.url) as client:
        for read in range(20):
            rows = client.decide_many((f"state {i}" for i in range(100)), QUESTIONS, concurrency=4)
            for _ in range(read):
                assert isinstance(await anext(rows), DecisionResult)
            await rows.aclose()
    gc.collect()  # a coroutine that never ran warns here, and a warning fails the test


def test_no_more_than_the_concurrency_is_in_flight(scripted: Callable[..., Served]) -> None:
    running = most = 0

    async def counting(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        yield [even(request, i) for i in range(len(request.questions))]

    with Sakuradite(MODEL, base_url=scripted(counting).url) as client:
        assert len(list(client.decide_many(["x"] * 30, QUESTIONS, concurrency=3))) == 30
    assert most == 3


async def test_a_result_does_not_wait_for_the_next_state(server: Served) -> None:
    more = asyncio.Event()

    async def slow_feed() -> AsyncIterator[str]:
        yield "first"
        await more.wait()

    async with Sakuradite(MODEL, base_url=server.url) as client:
        rows = client.decide_many(slow_feed(), QUESTIONS)
        assert isinstance(await anext(rows), DecisionResult)
        more.set()
        assert [row async for row in rows] == []


def test_leaving_early_cancels_what_is_in_flight(scripted: Callable[..., Served]) -> None:
    served = scripted(forever)
    with Sakuradite(MODEL, base_url=served.url) as client:
        rows = client.decide_many(["x"] * 9, QUESTIONS, concurrency=4, timeout=0.3)
        first = next(rows)
        assert not isinstance(first, DecisionResult)
        rows.close()
        wait_until(lambda: served.gateway.ended == len(served.gateway.requests))
        assert len(served.gateway.requests) <= 8


def test_what_is_wrong_with_all_is_raised_at_once(server: Served) -> None:
    with Sakuradite(MODEL, base_url=server.url) as client:
        with pytest.raises(ValidationError, match="questions"):
            client.decide_many(["x"], {})
        with pytest.raises(ConfigurationError, match="concurrency must be at least 1, not 0"):
            client.decide_many(["x"], QUESTIONS, concurrency=0)


def test_an_error_of_the_states_is_not_swallowed(server: Served) -> None:
    def broken() -> Iterator[str]:
        yield "x"
        raise LookupError("the file is gone")

    with Sakuradite(MODEL, base_url=server.url) as client, pytest.raises(LookupError):
        list(client.decide_many(broken(), QUESTIONS))


async def test_an_error_of_the_states_is_not_swallowed_in_coroutines(server: Served) -> None:
    async def broken() -> AsyncIterator[str]:
        yield "x"
        raise LookupError("the file is gone")

    async with Sakuradite(MODEL, base_url=server.url) as client:
        with pytest.raises(LookupError):
            [row async for row in client.decide_many(broken(), QUESTIONS)]


def test_a_server_that_is_gone_is_a_value_too() -> None:
    with Sakuradite(MODEL, base_url="http://127.0.0.1:9") as client:
        (row,) = client.decide_many(["x"], QUESTIONS)
    assert isinstance(row, TransportError)
    assert not row.sent


def test_a_client_closed_meanwhile_is_no_value(scripted: Callable[..., Served]) -> None:
    client = Sakuradite(MODEL, base_url=scripted(forever).url).open()
    rows = client.decide_many(iter(["x", "y", "z"]), QUESTIONS, concurrency=1, timeout=0.2)
    next(rows)
    client.close()
    with pytest.raises(ClosedError):
        next(rows)
