"""What all calls of one client share: its transport, opened once, and everything in flight, cancelled when it closes.

Runs in one event loop (`loop`); the sync and the async face (`faces`) are thin over it.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from sakuradite.answers import DecisionResult
from sakuradite.client.loop import CLOSED
from sakuradite.client.request import Decision
from sakuradite.client.stream import Events
from sakuradite.client.transport import Transport
from sakuradite.errors import APIError, ClosedError

MAX_RETRY_WAIT = 30.0  # seconds before one more try, whatever Retry-After says
FIRST_RETRY_WAIT = 0.5  # seconds, doubled with each try, where the server names no time


class Session:
    """The state of one client. Every method but the constructor runs in the client's loop."""

    def __init__(self, make_transport: Callable[[], Transport], retries: int = 0) -> None:
        self.closed = False
        self._make_transport = make_transport
        self._retries = retries
        self._opening: asyncio.Task[Transport] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: set[Events] = set()

    async def open(self) -> Transport:
        """The transport, opened by the first call while others wait. The next call tries a failed opening anew."""
        return await self.track(self._open())

    async def _open(self) -> Transport:
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._opening = asyncio.create_task(self._start())
        return await asyncio.shield(opening)

    async def _start(self) -> Transport:
        transport = self._make_transport()
        await transport.open()
        return transport

    async def decide(self, decision: Decision) -> DecisionResult:
        """The whole result. Answers of 429 and 503 that may pass are asked again, as often as `retries` allows."""
        return await self.track(self._decide(decision))

    async def _decide(self, decision: Decision) -> DecisionResult:
        transport = await self._open()
        clock = asyncio.get_running_loop().time
        deadline = None if decision.timeout is None else clock() + decision.timeout
        for attempt in range(self._retries + 1):
            left = None if deadline is None else deadline - clock()
            try:
                return await transport.decide(replace(decision, timeout=left))
            except APIError as error:
                wait = retry_wait(error, attempt)
                if attempt == self._retries or wait is None or (deadline is not None and clock() + wait >= deadline):
                    raise
            await asyncio.sleep(wait)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def stream(self, decision: Decision) -> Events:
        """The answers as they come. What fails before the first answer is raised here. Never tried again."""
        return await self.track(self._stream(decision))

    async def _stream(self, decision: Decision) -> Events:
        transport = await self._open()
        events = Events(self, decision, transport.stream(decision))
        self._streams.add(events)
        await events.begin()
        return events

    def forget(self, events: Events) -> None:
        """A stream has ended."""
        self._streams.discard(events)

    async def track[T](self, work: Coroutine[Any, Any, T]) -> T:
        """The result of some work; ClosedError when the client is closed, before or meanwhile."""
        if self.closed:
            work.close()
            raise ClosedError(CLOSED)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.closed and not (caller and caller.cancelling()):
                raise ClosedError("the client was closed during this call") from None
            raise

    async def close(self) -> None:
        """Cancel what is in flight, end the streams, release the transport. Later calls wait for the same closing."""
        self.closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        work: list[asyncio.Task[Any]] = [*self._tasks, *([self._opening] if self._opening else [])]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for events in list(self._streams):
            await events.close()
        opening = self._opening
        if opening is not None and not opening.cancelled() and opening.exception() is None:
            await opening.result().close()

    def __del__(self) -> None:
        if not self.closed and self._opening is not None:
            warnings.warn(
                "a Sakuradite client was not closed; use `with`, or call close()", ResourceWarning, stacklevel=2
            )


def retry_wait(error: APIError, attempt: int) -> float | None:
    """Seconds to wait before asking again, by Retry-After or doubling from FIRST_RETRY_WAIT; None: do not."""
    if not (error.retryable and error.status in (429, 503)):
        return None
    return min(MAX_RETRY_WAIT, FIRST_RETRY_WAIT * 2**attempt if error.retry_after is None else error.retry_after)
