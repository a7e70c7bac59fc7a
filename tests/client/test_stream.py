"""Answer streams: against the real application, and against a server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from sakuradite import AnswerEvent, ClosedError, CompleteEvent, DecisionStream, Sakuradite, TransportError
from sakuradite.errors import (
    APIError,
    ConfigurationError,
    ErrorRecord,
    InferenceFailedError,
    ModelNotFoundError,
    RequestTimeoutError,
)
from sakuradite.records import Outcome, RequestRecord, RowFailure
from tests.client.conftest import QUESTIONS
from tests.client.raw import EVENTS, RawServer, frame, reply
from tests.client.test_decide import forever, wait_until
from tests.http.serving import MODEL, Served, even

type Raw = Callable[..., RawServer]

Q = {"a": {"type": "noul"}, "b": {"type": "noul"}}
USAGE = {"input_tokens": 5, "output_tokens": 0}
NOUL = {"type": "noul", "noul": 0.75}


def answer(key: str, **changes: Any) -> bytes:
    return frame("answer", **({"model": MODEL, "key": key, "answer": NOUL, "usage": USAGE} | changes))


def complete(*keys: str, tokens: int = 10, **changes: Any) -> bytes:
    whole = {"model": MODEL, "answers": dict.fromkeys(keys, NOUL), "usage": USAGE | {"input_tokens": tokens}}
    return frame("complete", **(whole | changes))


# Good streams


def test_answers_come_one_by_one_then_complete(server: Served) -> None:
    with Sakuradite(MODEL, base_url=server.url) as client:
        whole = client.decide("x", QUESTIONS)
        stream = client.decide("x", QUESTIONS, stream=True)
        assert not hasattr(stream, "result")
        events = list(stream)
    assert [event.type for event in events] == ["answer"] * 3 + ["complete"]
    assert {event.key for event in events if isinstance(event, AnswerEvent)} == set(QUESTIONS)
    assert isinstance(events[-1], CompleteEvent)
    assert stream.result == whole
    assert events[-1].answers == whole.answers


async def test_coroutines_stream_the_same(server: Served) -> None:
    async with Sakuradite(MODEL, base_url=server.url) as client:
        async with await client.decide("x", QUESTIONS, stream=True) as stream:
            events = [event async for event in stream]
        assert stream.result == await client.decide("x", QUESTIONS)
    assert events[-1].type == "complete"


async def test_the_bare_object_streams_in_a_loop(server: Served) -> None:
    client = Sakuradite(MODEL, base_url=server.url)
    stream = await client.decide("x", QUESTIONS, stream=True)
    assert [event.type async for event in stream][-1] == "complete"
    await client.close()


def test_the_first_answer_does_not_wait_for_the_last(scripted: Callable[..., Served]) -> None:
    go = threading.Event()

    async def in_two_steps(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        yield [even(request, 1)]
        await asyncio.to_thread(go.wait, 20)
        yield [even(request, 0), even(request, 2)]

    served = scripted(in_two_steps)
    with Sakuradite(MODEL, base_url=served.url) as client:
        stream = client.decide("x", QUESTIONS, stream=True)
        first = next(iter(stream))
        assert isinstance(first, AnswerEvent)
        assert first.key == "team"
        go.set()
        assert len([*iter_again(stream)]) == 3


def iter_again(stream: DecisionStream) -> Any:
    """The rest of a stream that `iter` was called on already."""
    while True:
        try:
            yield next(stream)
        except StopIteration:
            return


# Failures


def test_a_failure_before_the_first_answer_is_raised_by_the_call(server: Served) -> None:
    with Sakuradite("absent", base_url=server.url) as client, pytest.raises(ModelNotFoundError) as raised:
        client.decide("x", QUESTIONS, stream=True)
    assert raised.value.status == 404


def test_a_later_failure_is_raised_as_its_class(scripted: Callable[..., Served]) -> None:
    async def fails(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        yield [even(request, 0)]
        yield [RowFailure(1, ErrorRecord("inference_failed", 500, "the forward failed"))]

    served = scripted(fails)
    with Sakuradite(MODEL, base_url=served.url) as client:
        stream = client.decide("x", QUESTIONS, stream=True)
        reader = iter(stream)
        assert next(reader).type == "answer"
        with pytest.raises(InferenceFailedError, match=r"questions\.team: the forward failed"):
            next(reader)
        with pytest.raises(InferenceFailedError):  # it stays failed
            next(reader)
        assert not hasattr(stream, "result")


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([answer("a")], "after 1 of 2 answers, before it was complete"),
        ([answer("a"), answer("b")], "after 2 of 2 answers, before it was complete"),
        ([answer("a"), answer("b"), complete("a", "b")[:-2]], "before it was complete"),
        ([answer("a"), answer("a")], "a second one"),
        ([answer("a"), answer("c")], "not asked for"),
        ([answer("a", answer=NOUL | {"type": "score"}), answer("b")], "not asked for|is not a AnswerEvent"),
        ([answer("a"), complete("a", "b")], "complete after 1 of 2 answers"),
        ([answer("a"), answer("b"), complete("a", tokens=5)], "does not repeat them"),
        ([answer("a"), answer("b"), complete("a", "b", tokens=11)], "does not repeat them"),
        ([answer("a"), answer("b"), complete("a", "b", answers={"a": NOUL, "b": NOUL | {"noul": 0.5}})], "does not"),
        ([answer("a"), answer("b"), complete("a", "b"), answer("a")], "went on after its complete event"),
        ([answer("a"), frame("answer", type="complete")], "whose type is not its event's name"),
        ([answer("a"), b"event: answer\ndata: {nonsense\n\n"], "not JSON"),
        ([answer("a"), b"data: 3\n\n"], "whose type is not its event's name"),
        ([answer("a"), frame("token", text="x")], "unknown type"),
        ([answer("a", usage={})], "is not a AnswerEvent: usage.input_tokens"),
        ([complete("a", "b")], "complete after 0 of 2 answers"),
        ([], "before it was complete"),
    ],
)
def test_a_broken_stream_is_a_transport_error(raw: Raw, frames: list[bytes], message: str) -> None:
    server = raw([EVENTS, *frames])
    with Sakuradite(MODEL, base_url=server.url) as client:
        stream = None
        with pytest.raises(TransportError, match=message):
            for _ in (stream := client.decide("x", Q, stream=True)):
                pass
    if stream is not None and "after its complete" not in message:
        assert not hasattr(stream, "result")
    assert len(server.requests) == 1


def test_a_stream_whose_connection_breaks_before_its_head_is_not_sent_again(raw: Raw) -> None:
    server = raw([])
    with Sakuradite(MODEL, base_url=server.url) as client, pytest.raises(TransportError):
        list(client.decide("x", Q, stream=True))
    assert len(server.requests) == 1


def test_a_connection_that_breaks_mid_frame_is_a_transport_error(raw: Raw) -> None:
    head = EVENTS.replace(b"connection: close", b"transfer-encoding: chunked")
    chunk = b"%x\r\n%b\r\n" % (len(answer("a")), answer("a"))
    server = raw([head, chunk, b"ff\r\nevent: ans"])
    with Sakuradite(MODEL, base_url=server.url) as client:
        stream = client.decide("x", Q, stream=True)
        with pytest.raises(TransportError, match="cut off"):
            list(stream)


def test_no_stream_at_all_is_a_transport_error(raw: Raw) -> None:
    url = raw([reply(200, {})]).url
    with Sakuradite(MODEL, base_url=url) as client, pytest.raises(TransportError, match="did not answer with a stream"):
        client.decide("x", Q, stream=True)


def test_comments_between_frames_are_nothing(raw: Raw) -> None:
    server = raw([EVENTS, b": ping\n\n", answer("a"), b": ping\n\n", answer("b"), complete("a", "b")])
    with Sakuradite(MODEL, base_url=server.url) as client:
        assert len(list(client.decide("x", Q, stream=True))) == 3


def test_an_error_event_keeps_an_unknown_code(raw: Raw) -> None:
    server = raw([EVENTS, answer("a"), frame("error", code="teapot", message="no", status_code=418)])
    with Sakuradite(MODEL, base_url=server.url) as client, pytest.raises(APIError) as raised:
        list(client.decide("x", Q, stream=True))
    assert (raised.value.code, raised.value.status) == ("teapot", 418)


def test_a_stream_left_open_after_complete_is_closed_by_us(raw: Raw) -> None:
    server = raw([EVENTS, answer("a"), answer("b"), complete("a", "b"), 60.0])
    with Sakuradite(MODEL, base_url=server.url) as client:
        assert len(list(client.decide("x", Q, stream=True))) == 3
    assert server.gone.wait(10)


def test_a_deadline_holds_between_answers(raw: Raw) -> None:
    server = raw([EVENTS, answer("a"), 60.0])
    with Sakuradite(MODEL, base_url=server.url) as client:
        stream = client.decide("x", Q, stream=True, timeout=0.3)
        with pytest.raises(RequestTimeoutError):
            list(stream)
    assert server.gone.wait(10)


# Who reads, and when it ends


def test_a_stream_has_one_consumer(server: Served) -> None:
    with Sakuradite(MODEL, base_url=server.url) as client:
        stream = client.decide("x", QUESTIONS, stream=True)
        reader = iter(stream)
        next(reader)
        with pytest.raises(ConfigurationError, match="already has a consumer"):
            iter(stream)
        assert len(list(iter_again(stream))) == 3


async def test_two_tasks_cannot_read_one_stream(scripted: Callable[..., Served]) -> None:
    async with Sakuradite(MODEL, base_url=scripted(forever).url) as client:
        stream = await client.decide("x", QUESTIONS, stream=True)
        reader = aiter(stream)
        await anext(reader)
        first = asyncio.create_task(anext(reader))
        await asyncio.sleep(0.05)
        with pytest.raises(ConfigurationError, match="already has a consumer"):
            await anext(reader)
        await stream.close()
        with pytest.raises((ClosedError, asyncio.CancelledError)):
            await first


def test_leaving_early_cancels_the_rest(scripted: Callable[..., Served]) -> None:
    served = scripted(forever)
    with Sakuradite(MODEL, base_url=served.url) as client:
        with client.decide("x", QUESTIONS, stream=True) as stream:
            next(iter(stream))
        wait_until(lambda: served.gateway.ended == 1)
        with pytest.raises(ClosedError, match="this stream is closed"):
            next(stream)
        assert not hasattr(stream, "result")


async def test_leaving_early_cancels_the_rest_in_coroutines(scripted: Callable[..., Served]) -> None:
    served = scripted(forever)
    async with Sakuradite(MODEL, base_url=served.url) as client:
        async with await client.decide("x", QUESTIONS, stream=True) as stream:
            async for _ in stream:
                break
        await asyncio.to_thread(wait_until, lambda: served.gateway.ended == 1)
        assert served.gateway.ended == 1


def test_closing_the_client_closes_its_streams(scripted: Callable[..., Served]) -> None:
    served = scripted(forever)
    client = Sakuradite(MODEL, base_url=served.url).open()
    stream = client.decide("x", QUESTIONS, stream=True)
    next(iter(stream))
    client.close()
    wait_until(lambda: served.gateway.ended == 1)
    with pytest.raises(ClosedError):
        next(stream)


def test_closing_the_client_wakes_a_reader(scripted: Callable[..., Served]) -> None:
    client = Sakuradite(MODEL, base_url=scripted(forever).url).open()
    stream = client.decide("x", QUESTIONS, stream=True)
    ended: list[BaseException] = []

    def read() -> None:
        try:
            list(stream)
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.2)
    client.close()
    thread.join(10)
    assert len(ended) == 1


async def test_a_cancelled_reader_cancels_the_stream(scripted: Callable[..., Served]) -> None:
    served = scripted(forever)
    async with Sakuradite(MODEL, base_url=served.url) as client:
        stream = await client.decide("x", QUESTIONS, stream=True)
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(stream)
        await asyncio.to_thread(wait_until, lambda: served.gateway.ended == 1)
        with pytest.raises(ClosedError):
            await anext(stream)
