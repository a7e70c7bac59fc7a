"""The two faces of an open client: methods that return values, and the same methods as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, overload

from sakuradite.answers import DecisionResult
from sakuradite.client.describe import Description
from sakuradite.client.loop import Loop
from sakuradite.client.many import DEFAULT_CONCURRENCY, Row, aordered, ordered
from sakuradite.client.models import AsyncModels, Models
from sakuradite.client.request import Decision, Image, State, check_state, decision
from sakuradite.client.session import Session
from sakuradite.client.stream import AsyncDecisionStream, DecisionStream
from sakuradite.config import ClientSettings
from sakuradite.errors import ClosedError, ConfigurationError, SakuraditeError
from sakuradite.questions import Questions


def no_model(settings: ClientSettings) -> str:
    """The ways to name a model, for a request that has none."""
    file = settings.home / "config.toml"
    return f"no model is set: pass model=… (to decide, or for the client), set SAKURADITE_MODEL, or put it in {file}"


class _Face:
    """What both faces know: the settings, the session, and the loop it runs in."""

    def __init__(self, settings: ClientSettings, session: Session, loop: Loop) -> None:
        self._settings, self._session, self._loop = settings, session, loop

    def describe(self) -> Description:
        """Where this client runs, and which setting made it so. Keys are never in it."""
        return Description.of(self._settings)

    @property
    def closed(self) -> bool:
        """Whether this client was closed. A closed one cannot be reopened."""
        return self._session.closed

    def _decision(
        self, state: State, questions: Questions, images: Sequence[Image], timeout: float | None, model: str | None
    ) -> Decision:
        """The valid request of one call; the client's model and timeout where the call names none."""
        own = self._settings.model
        name = model or own
        if name is None:
            raise ConfigurationError(no_model(self._settings))
        if not self._settings.base_url and name != own:
            raise ConfigurationError(f"an embedded client owns one model, {own}; open another client for {name}")
        return decision(name, state, questions, images, self._settings.timeout if timeout is None else timeout)

    def _rows(
        self, questions: Questions, timeout: float | None, model: str | None, concurrency: int
    ) -> Callable[[State], Coroutine[Any, Any, Row]]:
        """What decides on one state of many; what is wrong with all of them is raised here."""
        if concurrency < 1:
            raise ConfigurationError(f"concurrency must be at least 1, not {concurrency}")
        common = self._decision("", questions, (), timeout, model)
        slots = asyncio.Semaphore(concurrency)

        async def row(state: State) -> Row:
            async with slots:
                try:
                    return await self._session.decide(replace(common, state=check_state(state)))
                except ClosedError:
                    raise
                except SakuraditeError as error:
                    return error

        return row


class SyncClient(_Face):
    """An open client whose methods return values: what `with Sakuradite(…) as client` gives. Threads may share it."""

    @property
    def models(self) -> Models:
        """The models of the daemon this client speaks to."""
        return Models(self._session, self._loop, bool(self._settings.base_url))

    @overload
    def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = ...,
        stream: Literal[False] = ...,
        timeout: float | None = ...,
        model: str | None = ...,
    ) -> DecisionResult: ...

    @overload
    def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = ...,
        stream: Literal[True],
        timeout: float | None = ...,
        model: str | None = ...,
    ) -> DecisionStream: ...

    @overload
    def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = ...,
        stream: bool,
        timeout: float | None = ...,
        model: str | None = ...,
    ) -> DecisionResult | DecisionStream: ...

    def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = (),
        stream: bool = False,
        timeout: float | None = None,
        model: str | None = None,
    ) -> DecisionResult | DecisionStream:
        """Answer typed questions about a state.

        `images`: up to eight JPEG or PNG files as Path, bytes or base64 data URL. `stream=True` gives each answer when
        it is ready. `timeout`: seconds until a RequestTimeoutError, None for the client's, then the model's own.
        Raises ValidationError before anything is sent when the request is wrong, APIError when the model or the server
        says no, TransportError when no complete answer came, ClosedError when the client is closed meanwhile.
        """
        request = self._decision(state, questions, images, timeout, model)
        if stream:
            return DecisionStream(self._loop.wait(self._session.stream(request)), self._loop)
        return self._loop.wait(self._session.decide(request))

    def decide_many(
        self,
        states: Iterable[State],
        questions: Questions,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        timeout: float | None = None,
        model: str | None = None,
    ) -> Generator[Row]:
        """The same questions about many states: a DecisionResult or the error of each, in the order of the states.

        `concurrency` requests are in flight at once, and at most twice as many states are taken ahead of the results
        that you have read, so `states` may be endless. Leaving the loop early cancels what is in flight.
        """
        row = self._rows(questions, timeout, model, concurrency)
        return ordered(states, lambda state: self._loop.submit(row(state)), concurrency)

    def coroutines(self) -> AsyncClient:
        """The same client with coroutine methods, usable from any event loop. Closing either closes both."""
        return AsyncClient(self._settings, self._session, self._loop)

    def close(self) -> None:
        """Cancel what is in flight and release everything; a daemon's models stay loaded. Safe to call twice."""
        if not self._loop.ended:
            self._loop.wait(self._session.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Face):
    """An open client whose methods are coroutines: what `async with Sakuradite(…)` gives. Tasks may share it."""

    @property
    def models(self) -> AsyncModels:
        """The models of the daemon this client speaks to."""
        return AsyncModels(self._session, self._loop, bool(self._settings.base_url))

    @overload
    async def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = ...,
        stream: Literal[False] = ...,
        timeout: float | None = ...,
        model: str | None = ...,
    ) -> DecisionResult: ...

    @overload
    async def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = ...,
        stream: Literal[True],
        timeout: float | None = ...,
        model: str | None = ...,
    ) -> AsyncDecisionStream: ...

    @overload
    async def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = ...,
        stream: bool,
        timeout: float | None = ...,
        model: str | None = ...,
    ) -> DecisionResult | AsyncDecisionStream: ...

    async def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = (),
        stream: bool = False,
        timeout: float | None = None,
        model: str | None = None,
    ) -> DecisionResult | AsyncDecisionStream:
        """Answer typed questions about a state; arguments and errors as in `SyncClient.decide`."""
        if images:  # files are read and images checked, which takes a while
            request = await asyncio.to_thread(self._decision, state, questions, images, timeout, model)
        else:
            request = self._decision(state, questions, images, timeout, model)
        if stream:
            return AsyncDecisionStream(await self._loop.run(self._session.stream(request)), self._loop)
        return await self._loop.run(self._session.decide(request))

    def decide_many(
        self,
        states: Iterable[State] | AsyncIterable[State],
        questions: Questions,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        timeout: float | None = None,
        model: str | None = None,
    ) -> AsyncGenerator[Row]:
        """The same questions about many states, for `async for`; see `SyncClient.decide_many`."""
        row = self._rows(questions, timeout, model, concurrency)

        async def start(state: State) -> Row:  # makes the coroutine when it runs: cancelled before, it leaves none
            return await self._loop.run(row(state))

        return aordered(states, start, concurrency)

    async def close(self) -> None:
        """Cancel what is in flight and release everything; a daemon's models stay loaded. Safe to call twice."""
        if not self._loop.ended:
            await self._loop.run(self._session.close())
        self._loop.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
