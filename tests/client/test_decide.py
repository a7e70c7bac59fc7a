"""Deciding over HTTP against the real application: values, coroutines, and the bare object in between."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sakuradite import ClosedError, ModelConfig, Sakuradite
from sakuradite.errors import ConfigurationError
from sakuradite.records import Outcome, RequestRecord
from tests.client.conftest import QUESTIONS
from tests.http.serving import MODEL, Served, even


def test_with_gives_values(server: Served) -> None:
    with Sakuradite(MODEL, base_url=server.url) as client:
        result = client.decide(state="The parcel is broken.", questions=QUESTIONS)
    assert list(result.answers) == list(QUESTIONS)
    assert result.model == MODEL
    assert result.nouls["refund"].noul == pytest.approx(sum([result.nouls["refund"].noul]))
    assert sum(result.choices["team"].probabilities.values()) == pytest.approx(1)
    assert result.scores["urgency"].legend == {"0": "can wait", "1": "today", "2": "now"}
    assert result.usage.input_tokens > 0
    assert result.usage.output_tokens == 0


async def test_async_with_gives_coroutines(server: Served) -> None:
    async with Sakuradite(MODEL, base_url=server.url) as client:
        results = await asyncio.gather(*(client.decide("The parcel is broken.", QUESTIONS) for _ in range(8)))
    assert all(result == results[0] for result in results)


def test_open_gives_values(server: Served) -> None:
    client = Sakuradite(MODEL, base_url=server.url).open()
    assert client.decide("x", QUESTIONS).model == MODEL
    client.close()
    client.close()
    assert client.closed


async def test_aopen_gives_coroutines(server: Served) -> None:
    client = await Sakuradite(MODEL, base_url=server.url).aopen()
    assert (await client.decide("x", QUESTIONS)).model == MODEL
    await client.close()
    await client.close()
    assert client.closed


def test_the_bare_object_gives_values_without_a_loop(server: Served) -> None:
    client = Sakuradite(MODEL, base_url=server.url)
    result = client.decide("x", QUESTIONS)
    assert result.answers
    client.close()
    with pytest.raises(ClosedError, match="cannot be reopened"):
        client.decide("x", QUESTIONS)
    with pytest.raises(ClosedError, match="cannot be reopened"):
        client.open()


def test_the_bare_object_gives_coroutines_in_any_loop(server: Served) -> None:
    client = Sakuradite(MODEL, base_url=server.url)

    async def decide() -> Any:
        return await client.decide("x", QUESTIONS)

    async def close() -> None:
        await client.close()

    first = asyncio.run(decide())
    assert asyncio.run(decide()) == first  # another loop, the same client
    assert client.decide("x", QUESTIONS) == first
    asyncio.run(close())
    assert client.closed


def test_closing_the_bare_object_unused_is_closing_it(server: Served) -> None:
    client = Sakuradite(MODEL, base_url=server.url)
    client.close()
    with pytest.raises(ClosedError):
        client.decide("x", QUESTIONS)


async def test_closing_the_bare_object_in_a_loop_begins_at_once(server: Served) -> None:
    client = Sakuradite(MODEL, base_url=server.url)
    await client.decide("x", QUESTIONS)
    closing = client.close()
    assert client.closed or not closing.done()
    await closing
    with pytest.raises(ClosedError):
        await client.decide("x", QUESTIONS)


async def test_with_in_a_running_loop_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use `async with Sakuradite") as refused, Sakuradite(MODEL):
        pass
    assert refused.value.code == "configuration_error"
    with pytest.raises(ConfigurationError, match="await aopen"):
        Sakuradite(MODEL).open()


def test_threads_share_a_client(server: Served) -> None:
    with Sakuradite(MODEL, base_url=server.url) as client, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: client.decide(f"state {i % 4}", QUESTIONS), range(40)))
    for i, result in enumerate(results):
        assert result == results[i % 4]
    assert results[0] != results[1]


async def test_an_async_client_works_from_other_loops_too(server: Served) -> None:
    async with Sakuradite(MODEL, base_url=server.url) as client:
        here = await client.decide("x", QUESTIONS)

        async def decide() -> Any:
            return await client.decide("x", QUESTIONS)

        there = await asyncio.to_thread(asyncio.run, decide())
    assert here == there


def test_the_model_may_be_named_with_each_decision(server: Served) -> None:
    with Sakuradite(base_url=server.url) as client:
        assert client.decide("x", QUESTIONS, model="jev-latest").model == MODEL
        with pytest.raises(ConfigurationError, match=r"no model is set.*SAKURADITE_MODEL.*config\.toml"):
            client.decide("x", QUESTIONS)


async def forever(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
    yield [even(request, 0)]
    await asyncio.Event().wait()


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_closing_cancels_a_running_request_and_says_so(scripted: Callable[..., Served]) -> None:
    served = scripted(forever)
    client = Sakuradite(MODEL, base_url=served.url).open()
    errors: list[BaseException] = []

    def decide() -> None:
        try:
            client.decide("x", QUESTIONS)
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=decide)
    thread.start()
    wait_until(lambda: served.gateway.produced == 1)
    client.close()
    thread.join(10)
    assert [str(error) for error in errors] == ["the client was closed during this call"]
    wait_until(lambda: served.gateway.ended == 1)  # the model was told


async def test_closing_cancels_a_running_coroutine_and_says_so(scripted: Callable[..., Served]) -> None:
    served = scripted(forever)
    async with Sakuradite(MODEL, base_url=served.url) as client:
        task = asyncio.create_task(client.decide("x", QUESTIONS))
        await asyncio.to_thread(wait_until, lambda: served.gateway.produced == 1)
    with pytest.raises(ClosedError, match="during this call"):
        await task


async def test_cancelling_a_task_stays_a_cancellation(scripted: Callable[..., Served]) -> None:
    served = scripted(forever)
    async with Sakuradite(MODEL, base_url=served.url) as client:
        task = asyncio.create_task(client.decide("x", QUESTIONS))
        await asyncio.to_thread(wait_until, lambda: served.gateway.produced == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: served.gateway.ended == 1)
        assert not client.closed


def test_a_forgotten_close_is_a_resource_warning(server: Served) -> None:
    client = Sakuradite(MODEL, base_url=server.url)
    client.decide("x", QUESTIONS)
    loop = client._started(None)[0]._loop
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del client
        gc.collect()
    loop.stop()
    assert "a Sakuradite client was not closed; use `with`, or call close()" in [str(w.message) for w in caught]


def test_an_embedded_client_refuses_another_model() -> None:
    client = Sakuradite(ModelConfig(model="a", backend="fake"))
    with pytest.raises(ConfigurationError, match="owns one model, a; open another client for b"):
        client.decide("x", QUESTIONS, model="b")
    client.close()
