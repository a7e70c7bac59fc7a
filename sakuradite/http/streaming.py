"""Outcomes on their way to the caller: collected into one result, or sent as events with real flow control."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

from sakuradite.errors import APIError, InternalError
from sakuradite.http.body import ClientGone, Receive
from sakuradite.http.dialects import Ask
from sakuradite.http.exchange import EVENTS, Exchange, Send
from sakuradite.http.refusals import unexpected
from sakuradite.records import Outcome, RowAnswer, RowFailure

type Groups = AsyncGenerator[list[Outcome]]

HEADERS = ((b"x-accel-buffering", b"no"),)  # nginx would hold events back


class WhileConnected:
    """A block that is left with ClientGone when the caller closes the connection; the body must have been read."""

    __slots__ = ("_gone", "_receive", "_task", "_watch")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._gone:
            self._watch.cancel()
        elif self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from None


async def collect(ask: Ask, groups: Groups) -> list[RowAnswer]:
    """All rows in the order of the questions. The first failure ends it: the remaining rows are cancelled."""
    rows: list[RowAnswer | None] = [None] * len(ask.questions)
    async with contextlib.aclosing(groups):
        async for group in groups:
            for outcome in group:
                rows[outcome.row] = answered(ask, outcome)
    return complete(rows)


def answered(ask: Ask, outcome: Outcome) -> RowAnswer:
    """The outcome as an answer; a failure is raised as the APIError of its question."""
    if isinstance(outcome, RowFailure):
        raise ask.failure(outcome)
    return outcome


def complete(rows: Sequence[RowAnswer | None]) -> list[RowAnswer]:
    """The rows, none missing. Raises InternalError where the model left one out."""
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        raise InternalError(f"{len(rows) - len(found)} of {len(rows)} questions were left without an answer")
    return found


async def stream(exchange: Exchange, ask: Ask, model: str, groups: Groups, write_timeout: float) -> None:
    """Send each answer as an event when its group is there, then the whole result.

    The next group is asked for only after the last one was written, so a reader that does not read holds the producer
    at one group and the buffers of the connection, and is cut off after `write_timeout` seconds. A failure before the
    first answer is raised; a later one is sent as the last event.
    """
    rows: list[RowAnswer | None] = [None] * len(ask.questions)
    writer = _Writer(exchange, write_timeout)
    async with contextlib.aclosing(groups):
        try:
            async for group in groups:
                frames = []
                failure = None
                for outcome in group:
                    try:
                        row = answered(ask, outcome)
                    except APIError as error:
                        failure = error
                        break
                    rows[row.row] = row
                    frames.append(_answer(ask, model, row))
                if frames:
                    await writer.write(b"".join(frames))
                if failure is not None:
                    raise failure
            whole = complete(rows)
            exchange.account.input_tokens = sum(row.input_tokens for row in whole)
            result = {"type": "complete", **ask.result(model, whole)}
        except ClientGone:
            raise
        except Exception as failed:
            if not exchange.status:
                raise
            last = failed if isinstance(failed, APIError) else unexpected(failed, exchange.id)
            exchange.account.code = last.code
            result = {"type": "error", "code": last.code, "message": last.message, "status_code": last.status}
            if last.param is not None:
                result["param"] = last.param
    await writer.write(_frame(result), last=True)


def _answer(ask: Ask, model: str, row: RowAnswer) -> bytes:
    usage = {"input_tokens": row.input_tokens, "output_tokens": 0}
    key = ask.location(row.row)[-1]
    return _frame({"type": "answer", "model": model, "key": key, "answer": ask.answer(row), "usage": usage})


def _frame(payload: dict[str, Any]) -> bytes:
    """An event whose name is the payload's type."""
    return b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), orjson.dumps(payload))


class _Writer:
    """The response body of a stream, each write bounded in time."""

    def __init__(self, exchange: Exchange, timeout: float) -> None:
        self.exchange, self.timeout = exchange, timeout

    async def write(self, data: bytes, last: bool = False) -> None:
        """Send bytes. Raises ClientGone, with the connection cut, when the caller does not take them in time."""
        try:
            async with asyncio.timeout(self.timeout):
                if not self.exchange.status:
                    await self.exchange.start(200, EVENTS, HEADERS, None)
                await self.exchange.send({"type": "http.response.body", "body": data, "more_body": not last})
        except TimeoutError:
            if abort(self.exchange.send):
                with contextlib.suppress(TimeoutError):  # until the server has seen the end of the connection
                    async with asyncio.timeout(1):
                        await self.exchange.receive()
            raise ClientGone from None


def abort(send: Send) -> bool:
    """Cut the connection behind an ASGI `send` at once; False where the server is not uvicorn.

    ASGI has no word for it: returning early makes uvicorn close the transport politely, which waits for ever for a
    reader that does not read. The transport is an attribute of the object whose method `send` is.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        return False
    if (connection := transport.get_extra_info("socket")) is not None:
        # A reset at once, so that the kernel does not keep the unsent megabytes for a reader that is not there.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
    return True
