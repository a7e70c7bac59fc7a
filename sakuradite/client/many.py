"""Many states, one set of questions: results in the order of the states, at most a window of them in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any

from sakuradite.answers import DecisionResult
from sakuradite.client.request import State
from sakuradite.errors import SakuraditeError

DEFAULT_CONCURRENCY = 16  # requests in flight; the engine joins their rows into batches of 16 by default
WINDOW = 2  # states read ahead, as a multiple of the concurrency: what a slow first row may hold back

type Row = DecisionResult | SakuraditeError
"""What became of one state: its result, or the error as a value."""


def ordered[T](states: Iterable[State], start: Callable[[State], Future[T]], concurrency: int) -> Generator[T]:
    """Results in order, for synchronous callers; at most WINDOW × concurrency states are taken ahead."""
    window: deque[Future[T]] = deque()
    try:
        for state in states:
            window.append(start(state))
            while window and (len(window) >= WINDOW * concurrency or window[0].done()):
                yield window[0].result()
                window.popleft()
        while window:
            yield window[0].result()
            window.popleft()
    finally:
        for future in window:
            future.cancel()


async def aordered[T](
    states: Iterable[State] | AsyncIterable[State], start: Callable[[State], Awaitable[T]], concurrency: int
) -> AsyncGenerator[T]:
    """Results in order, for coroutines. A result is given as soon as it is there, also while the next state is not."""
    source = aiter(states if isinstance(states, AsyncIterable) else _each(states))
    window: deque[asyncio.Future[T]] = deque()
    coming: asyncio.Task[State] | None = asyncio.create_task(_next(source))
    try:
        while coming or window:
            room = len(window) < WINDOW * concurrency
            awaited: list[asyncio.Future[Any]] = [*([coming] if coming and room else []), *list(window)[:1]]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if coming and room and coming.done():
                try:
                    window.append(asyncio.ensure_future(start(coming.result())))
                    coming = asyncio.create_task(_next(source))
                except StopAsyncIteration:
                    coming = None
            while window and window[0].done():
                yield window.popleft().result()
    finally:
        left: list[asyncio.Future[Any]] = [*window, *([coming] if coming else [])]
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _next(source: AsyncIterator[State]) -> State:
    return await anext(source)


async def _each(states: Iterable[State]) -> AsyncIterator[State]:
    for state in states:
        yield state
