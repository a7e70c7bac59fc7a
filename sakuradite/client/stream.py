"""Answers as they come: checked events, one consumer, cancelled on early exit; the sync and the async face of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sakuradite.answers import DecisionResult
from sakuradite.client.loop import Loop
from sakuradite.client.request import Decision
from sakuradite.client.transport import AnswerEvent, CompleteEvent, StreamEvent
from sakuradite.errors import ClosedError, ConfigurationError, TransportError

if TYPE_CHECKING:
    from sakuradite.client.session import Session

NO_RESULT = "a stream has a result only after its complete event: read it to the end first"
ONE_CONSUMER = "this stream already has a consumer; a stream can be read once, by one reader"


class Events:
    """The events of one request, in the client's loop: what `Transport.stream` gives, checked for consistency.

    An answer must be of a question that was asked and not answered yet; `complete` must repeat all of them, with the
    sum of their usage, and be last. Anything else is a TransportError, never a partial success.
    """

    def __init__(self, session: Session, decision: Decision, source: AsyncGenerator[StreamEvent]) -> None:
        self.result: DecisionResult | None = None
        self._session = session
        self._decision = decision
        self._source = source
        self._seen: dict[str, AnswerEvent] = {}
        self._first: StreamEvent | None = None
        self._step: asyncio.Task[StreamEvent | None] | None = None
        self._ended: Exception | None = None
        self._finished = False

    async def begin(self) -> None:
        """Wait for the first event, so that a request that fails at once fails where it was made."""
        self._first = await self._advance()

    async def next(self) -> StreamEvent | None:
        """The next event, None after the last. A stream that failed or was closed raises the same error again."""
        if self._first is not None:
            event, self._first = self._first, None
            return event
        if self._finished:
            return None
        if self._ended is not None:
            raise self._ended
        if self._step is not None:
            raise ConfigurationError(ONE_CONSUMER)
        return await self._session.track(self._advance())

    async def _advance(self) -> StreamEvent | None:
        self._step = asyncio.create_task(self._checked())
        try:
            return await self._step
        except BaseException as error:
            self._ended = error if isinstance(error, Exception) else ClosedError("this stream was cancelled")
            await self._release()
            raise
        finally:
            self._step = None

    async def _checked(self) -> StreamEvent | None:
        try:
            event = await anext(self._source)
        except StopAsyncIteration:
            if self.result is None:
                raise TransportError(f"the stream ended after {self._count()}, before it was complete") from None
            self._finished = True
            await self._release()
            return None
        if self.result is not None:
            raise TransportError("the stream went on after its complete event")
        if isinstance(event, AnswerEvent):
            self._check_answer(event)
        else:
            self._check_complete(event)
            self.result = DecisionResult(model=event.model, answers=event.answers, usage=event.usage)
        return event

    def _check_answer(self, event: AnswerEvent) -> None:
        question = self._decision.questions.get(event.key)
        if question is None or event.key in self._seen or event.answer.type != question.type:
            raise TransportError("the stream is inconsistent: an answer that was not asked for, or a second one")
        self._seen[event.key] = event

    def _check_complete(self, event: CompleteEvent) -> None:
        tokens = sum(answer.usage.input_tokens for answer in self._seen.values())
        same = {key: answer.answer for key, answer in self._seen.items()} == event.answers
        if self._seen.keys() != self._decision.questions.keys() or not same or tokens != event.usage.input_tokens:
            raise TransportError(f"the stream is inconsistent: complete after {self._count()} does not repeat them")

    def _count(self) -> str:
        return f"{len(self._seen)} of {len(self._decision.questions)} answers"

    async def close(self) -> None:
        """Cancel what has not been read. Nothing happens to a stream that has ended."""
        if not self._finished and self._ended is None:
            self._ended = ClosedError("the client was closed" if self._session.closed else "this stream is closed")
        self._first = None
        if self._step is not None:
            self._step.cancel()
            await asyncio.wait([self._step])
        await self._release()

    async def _release(self) -> None:
        self._session.forget(self)
        await self._source.aclose()


class DecisionStream:
    """Events of one request, for `for event in stream`: an AnswerEvent each, then the CompleteEvent.

    Reading to the end closes it; so does `with stream:`, which cancels the rest when left early. One reader only.
    """

    def __init__(self, events: Events, loop: Loop) -> None:
        self._events, self._loop, self._taken = events, loop, False

    @property
    def result(self) -> DecisionResult:
        """The whole result. There is none (AttributeError) before the complete event."""
        if self._events.result is None:
            raise AttributeError(NO_RESULT)
        return self._events.result

    def __iter__(self) -> Self:
        if self._taken:
            raise ConfigurationError(ONE_CONSUMER)
        self._taken = True
        return self

    def __next__(self) -> StreamEvent:
        event = self._loop.wait(self._events.next())
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the stream; work that has not started is cancelled."""
        self._loop.wait(self._events.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncDecisionStream:
    """Events of one request, for `async for event in stream`: an AnswerEvent each, then the CompleteEvent.

    Reading to the end closes it; so does `async with stream:`, which cancels the rest when left early. One reader only.
    """

    def __init__(self, events: Events, loop: Loop) -> None:
        self._events, self._loop, self._taken = events, loop, False

    @property
    def result(self) -> DecisionResult:
        """The whole result. There is none (AttributeError) before the complete event."""
        if self._events.result is None:
            raise AttributeError(NO_RESULT)
        return self._events.result

    def __aiter__(self) -> Self:
        if self._taken:
            raise ConfigurationError(ONE_CONSUMER)
        self._taken = True
        return self

    async def __anext__(self) -> StreamEvent:
        event = await self._loop.run(self._events.next())
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """End the stream; work that has not started is cancelled."""
        await self._loop.run(self._events.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
