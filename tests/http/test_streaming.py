"""Events: their order and shape, real flow control, and callers who go away."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx_sse
import pytest

from sakuradite.errors import ContextExceededError, ErrorRecord, ReplicaUnavailableError
from sakuradite.records import Outcome, RequestRecord, RowFailure
from tests.http.conftest import CHOICE, NOUL, SCORE, native
from tests.http.serving import MODEL, EngineGateway, ScriptedGateway, Served, even, evenly, serve

MANY = {f"q{i}": NOUL for i in range(400)}
WIDE = {"type": "choice", "criteria": {f"{'option' * 20}{i}": None for i in range(255)}}


def events(served: Served, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream, each with its name."""
    with httpx_sse.connect_sse(served.client, "POST", "/v1/decisions", json=body | {"stream": True}) as source:
        assert source.response.status_code == 200
        assert source.response.headers["content-type"].startswith("text/event-stream")
        assert source.response.headers["x-accel-buffering"] == "no"
        assert source.response.headers["cache-control"] == "no-store"
        assert "x-request-id" in source.response.headers
        for frame in source.iter_sse():
            payload = json.loads(frame.data)
            assert payload["type"] == frame.event
            yield frame.event, payload


def test_answers_come_as_events_and_then_the_whole_result(open_server: Served) -> None:
    body = native({"q": NOUL, "c": CHOICE, "s": SCORE})
    whole = open_server.client.post("/v1/decisions", json=body).json()
    *answers, (last, complete) = events(open_server, body)
    assert [name for name, _ in answers] == ["answer"] * 3
    assert last == "complete"
    assert complete == {"type": "complete", **whole}
    for _, event in answers:
        assert list(event) == ["type", "model", "key", "answer", "usage"]
        assert event["model"] == MODEL
        assert event["answer"] == whole["answers"][event["key"]]
    assert sum(e["usage"]["input_tokens"] for _, e in answers) == whole["usage"]["input_tokens"]


def test_answers_are_sent_when_they_are_ready(scripted: Callable[..., Served]) -> None:
    gate = threading.Event()

    async def script(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        yield [even(request, 1)]
        await asyncio.to_thread(gate.wait)
        yield [even(request, 2), even(request, 0)]

    stream = events(scripted(script), native({"a": NOUL, "b": NOUL, "c": NOUL}))
    assert next(stream)[1]["key"] == "b"
    gate.set()
    assert [e.get("key") for _, e in stream] == ["c", "a", None]


def failing(error: Exception, after: int = 0, row: bool = False) -> Callable[..., Any]:
    """A script that fails after some answers, as a whole or in a row."""

    async def script(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        for i in range(after):
            yield [even(request, i)]
        if row:
            yield [RowFailure(after, ErrorRecord("context_exceeded", 413, "too long"))]
        else:
            raise error

    return script


@pytest.mark.parametrize("row", [False, True])
def test_a_failure_before_the_first_answer_keeps_its_status(scripted: Callable[..., Served], row: bool) -> None:
    served = scripted(failing(ContextExceededError("too long"), row=row))
    response = served.client.post("/v1/decisions", json=native(stream=True))
    assert response.status_code == 413
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "context_exceeded"


@pytest.mark.parametrize("row", [False, True])
def test_a_later_failure_is_the_last_event(scripted: Callable[..., Served], row: bool) -> None:
    served = scripted(failing(ReplicaUnavailableError("it died"), after=1, row=row))
    (_, first), (name, error) = events(served, native({"a": NOUL, "b": NOUL}))
    assert first["key"] == "a"
    assert name == "error"
    if row:
        expected = {"code": "context_exceeded", "status_code": 413, "param": "questions.b"}
        assert error == {"type": "error", "message": "questions.b: too long", **expected}
    else:
        assert error == {"type": "error", "code": "replica_unavailable", "message": "it died", "status_code": 503}
    assert served.gateway.ended == 1


def test_an_answer_in_the_same_group_as_a_failure_is_sent(scripted: Callable[..., Served]) -> None:
    async def script(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        yield [even(request, 0), RowFailure(1, ErrorRecord("inference_failed", 500, "no"))]

    names = [name for name, _ in events(scripted(script), native({"a": NOUL, "b": NOUL}))]
    assert names == ["answer", "error"]


def test_a_defect_and_a_missing_row_are_internal_errors(scripted: Callable[..., Served]) -> None:
    async def short(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        yield [even(request, 0)]

    for script in (failing(KeyError("secret"), after=1), short):
        served = scripted(script)
        *_, (name, error) = events(served, native({"a": NOUL, "b": NOUL}))
        assert (name, error["code"], error["status_code"]) == ("error", "internal_error", 500)
        assert "secret" not in error["message"]
        response = served.client.post("/v1/decisions", json=native({"a": NOUL, "b": NOUL}))
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"


def connect(served: Served, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A raw connection that has sent a request and read nothing."""
    caller = socket.socket()
    if receive_buffer is not None:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    caller.settimeout(20)
    caller.connect(("127.0.0.1", served.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/decisions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    caller.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return caller


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_a_reader_that_reads_nothing_stops_the_producer_and_is_cut_off(
    http: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each event has 40 KB: 400 of them are 16 MB, far more than the buffers of a connection hold."""
    gateway = ScriptedGateway(evenly)
    with serve(gateway, http=http, stream_write_timeout=0.7) as served:
        body = native({f"q{i}": WIDE for i in range(400)}, stream=True)
        with connect(served, body, receive_buffer=4096) as caller:
            until(lambda: gateway.produced > 0)
            seen = -1
            while seen != gateway.produced:
                seen = gateway.produced
                time.sleep(0.2)
            assert seen < 200, "the producer went on although nothing was read"
            until(lambda: gateway.ended == 1)
            assert gateway.produced <= seen + 1
            received = b""
            with pytest.raises(ConnectionResetError):  # noqa: PT012  # the rest of the buffers may come first
                while chunk := caller.recv(1 << 20):
                    received += chunk
                raise AssertionError("the stream ended as if it were whole")
            assert b"event: complete" not in received
        until(lambda: served.app.site.admission.requests == 0)
        assert served.client.get("/healthz").status_code == 200
    assert [r.message for r in caplog.records if r.levelname == "ERROR"] == []


def test_a_slow_reader_gets_everything(scripted: Callable[..., Served]) -> None:
    served = scripted()
    body = native({f"q{i}": WIDE for i in range(100)}, stream=True)
    received = b""
    with connect(served, body, receive_buffer=4096) as caller:
        while b"\r\n0\r\n\r\n" not in received[-16:]:
            received += caller.recv(16384)
    assert received.count(b"event: answer") == 100
    assert received.count(b"event: complete") == 1
    assert served.gateway.ended == 1


def stuck(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
    """Answers the first question and never another."""

    async def script() -> AsyncGenerator[list[Outcome]]:
        yield [even(request, 0)]
        await asyncio.Event().wait()

    return script()


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_that_goes_away_ends_its_request(http: str, stream: bool) -> None:
    gateway = ScriptedGateway(stuck)
    with serve(gateway, http=http) as served:
        caller = connect(served, native({"a": NOUL, "b": NOUL}, stream=stream))
        until(lambda: gateway.produced == 1)
        if stream:
            assert caller.recv(15) == b"HTTP/1.1 200 OK"
        caller.close()
        until(lambda: gateway.ended == 1)
        until(lambda: served.app.site.admission.requests == 0)


def test_a_caller_that_goes_away_before_its_body_is_whole(scripted: Callable[..., Served]) -> None:
    served = scripted()
    caller = socket.create_connection(("127.0.0.1", served.port))
    head = b"POST /v1/decisions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    caller.sendall(head + b"Content-Type: application/json\r\n\r\n{")
    until(lambda: served.app.site.admission.requests == 1)
    caller.close()
    until(lambda: served.app.site.admission.requests == 0)
    assert served.gateway.requests == []


def test_a_caller_that_goes_away_stops_the_rows_that_have_not_started() -> None:
    gateway = EngineGateway("fake?latency=0.2", max_batch_size=1)
    with serve(gateway) as served:
        caller = connect(served, native(MANY, model="fake"))
        until(lambda: gateway.engine.pending_requests == 1)
        time.sleep(0.5)
        caller.close()
        until(lambda: gateway.engine.pending_requests == 0, seconds=3)
        assert gateway.engine.pending_requests == 0


def test_uvicorns_transport_can_be_aborted(open_server: Served) -> None:
    """`abort` reaches for an attribute of uvicorn's; this fails when it goes."""
    from uvicorn.protocols.http import h11_impl, httptools_impl

    from sakuradite.http.streaming import abort

    class Transport:
        aborted = False

        def get_extra_info(self, name: str) -> None:
            return None

        def abort(self) -> None:
            self.aborted = True

    for module in (h11_impl, httptools_impl):
        cycle = module.RequestResponseCycle.__new__(module.RequestResponseCycle)
        cycle.transport = Transport()
        assert abort(cycle.send)
        assert cycle.transport.aborted

    async def send(message: dict[str, Any]) -> None:
        pass

    assert not abort(send)
