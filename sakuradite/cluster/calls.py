"""The caller's side of a model: requests that wait at the same moment go out in one gRPC call, rows come back as ready.

Used by the router and by embedded clients alike. Belongs to the event loop in which it is made. Long because joining,
choosing a replica, deadlines, cancellation and what follows a replica's death all move the same tickets.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from typing import Any, Protocol

from sakuradite.cluster.balance import TokenQueues, tokens_of
from sakuradite.cluster.blame import Blamed
from sakuradite.cluster.deaths import Place, node_lost
from sakuradite.cluster.handles import MODEL_DEPLOYMENT, forget_classes, handle_of, running_replicas
from sakuradite.errors import (
    APIError,
    InferenceFailedError,
    InternalError,
    ReplicaUnavailableError,
    RequestTimeoutError,
    error_from_record,
    place_of,
)
from sakuradite.records import Outcome, RequestRecord, RowFailure, pack_request, unpack_outcomes

log = logging.getLogger(__name__)

MAX_CALL_BYTES = 3 << 20
"""A call by gRPC holds up to this much (Ray's limit is 4 MB, its envelope included); above it goes by reference."""
MAX_CALL_REQUESTS = 64
"""Of one call, so that several replicas get their share."""
FREE_CALLS = 2
"""With fewer calls than this in flight a request goes out at once."""
JOIN_SECONDS = 0.002
"""Otherwise it waits for the end of a call, at most this long: at full load a call then carries many requests."""
GRACE_SECONDS = 2.0
"""The replica keeps the deadline; past it by this much the caller gives up on the replica."""
RETRY_AFTER_SECONDS = 5.0

SUSPECT_DEATHS = 2
"""A request whose replicas died so often goes out alone, to be computed with nobody else. If that replica dies too, and
not with its node, the request is to blame; what dies before its turn, or among others, is not counted against it."""
MAX_DEATHS = 10
"""Then it is given up without blame: its deadline may be far, and it may kill before its turn is told."""
SUSPECT_SECONDS = 0.5
"""Up to so long, at random, before each that goes alone: those of several routers must not meet at a new replica."""
SUSPECT_LOOKS = 40  # for a replica that is up; then the call itself waits for one, which also brings it about


class _Ticket:
    """One request on its way. Outcomes wait here until the reader takes them: no more than one per row."""

    __slots__ = (
        "alone", "attempts", "failure", "key", "outcomes", "owed", "packet", "queues", "replica", "request",
        "rows_left", "size", "tokens", "wake",
    )  # fmt: skip

    def __init__(self, key: str, request: RequestRecord, queues: TokenQueues) -> None:
        self.key, self.request = key, request
        self.packet = pack_request(request)
        self.size = len(self.packet[0]) + sum(map(len, self.packet[1]))
        rows = len(request.questions)
        self.rows_left = set(range(rows))
        self.queues, self.replica = queues, ""
        self.tokens = tokens_of(self.packet, rows) / max(1, rows)
        self.owed = 0.0
        self.outcomes: list[Outcome] = []
        self.failure: APIError | None = None
        self.wake: asyncio.Future[None] | None = None
        self.attempts = 0
        self.alone = False

    def join(self, replicas: Collection[str]) -> None:
        """Take a place in the shortest queue; after the death of a replica in another one."""
        self.owed = self.tokens * len(self.rows_left)
        self.replica = self.queues.choose(replicas, self.owed, avoid=self.replica)

    def leave(self) -> None:
        """Give the place back, if it has one."""
        self._give_back(self.owed)

    def _give_back(self, tokens: float) -> None:
        tokens = min(tokens, self.owed)
        self.owed -= tokens
        self.queues.answered(self.replica, tokens)

    def deliver(self, outcomes: list[Outcome]) -> None:
        """Take over what is new; after a retry rows come a second time."""
        before = len(self.rows_left)
        for outcome in outcomes:
            if outcome.row in self.rows_left:
                self.rows_left.discard(outcome.row)
                self.outcomes.append(outcome)
            elif outcome.row < 0 and isinstance(outcome, RowFailure):
                self.leave()
                self.failure = error_from_record(outcome.error)
        self._give_back(self.tokens * (before - len(self.rows_left)))
        self._wake()

    def fail(self, error: APIError) -> None:
        self.leave()
        self.failure = error
        self._wake()

    @property
    def done(self) -> bool:
        return self.failure is not None or not self.rows_left

    def _wake(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


class Counts(Protocol):
    """A counter."""

    def inc(self, amount: float = 1) -> None: ...


class ModelCalls:
    """Decide with the replicas of one deployed model."""

    def __init__(
        self,
        application: str,
        timeout: float,
        cold_start: str = "wait",
        retries: Counts | None = None,
        model: str | None = None,
    ) -> None:
        """`timeout` in seconds for requests that bring none; `retries` counts those that are sent once more.

        `model` is the one that must answer: a Serve config may give an application another one while requests wait.
        Must be called inside the event loop that will use it.
        """
        self._retries = retries
        handle = handle_of(MODEL_DEPLOYMENT, application)
        self._together, self._alone = (
            {large: handle.options(stream=True, method_name=method, _by_reference=large) for large in (False, True)}
            for method in ("decide_many", "decide_alone")
        )
        self._handle = handle
        self._describe = handle.options(method_name="describe", _by_reference=False)
        self._timeout, self._cold_start, self._model = timeout, cold_start, model
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Ticket] = []
        self._calls: dict[asyncio.Task[None], list[_Ticket]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._cancelled: list[str] = []
        self._suspects: list[_Ticket] = []
        self._trial: asyncio.Task[None] | None = None
        self._verdicts: dict[asyncio.Task[None], _Ticket] = {}
        self._blamed = Blamed()
        self._starting: asyncio.Task[None] | None = None
        self._queues = TokenQueues()
        self._numbers = itertools.count()
        self._open = 0
        self._idle: asyncio.Future[None] | None = None
        self._name = f"{os.getpid():x}-{id(self):x}"

    async def decide(self, request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        """Outcomes in groups as batches finish, each row exactly once; closing it early cancels what has not started.

        Raises the request's own failure, RequestTimeoutError, ReplicaUnavailableError, or InferenceFailedError for one
        that replicas die of.
        """
        self._blamed.refuse(request)
        if self._cold_start == "reject" and running_replicas(self._handle) == []:
            self._start_a_replica()
            raise ReplicaUnavailableError(
                "no replica of the model is up; one is being started", retry_after=RETRY_AFTER_SECONDS
            )
        allowed = request.timeout if request.timeout is not None else self._timeout
        deadline = self._loop.time() + allowed + GRACE_SECONDS
        # Callers may choose equal request ids, so the call has keys of its own.
        ticket = _Ticket(f"{self._name}-{next(self._numbers)}", request, self._queues)
        self._open += 1
        self._waiting.append(ticket)
        self._send()
        try:
            while True:
                while not ticket.outcomes and not ticket.done:
                    await self._wake(ticket, deadline, allowed)
                if ticket.outcomes:
                    group, ticket.outcomes = ticket.outcomes, []
                    yield group
                elif ticket.failure is not None:
                    raise ticket.failure
                else:
                    return
        finally:
            self._open -= 1
            if self._open == 0 and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
            if not ticket.done:
                self._cancel(ticket, ReplicaUnavailableError("cancelled by the caller"))

    @property
    def handle(self) -> Any:
        """Serve's handle of the deployment."""
        return self._handle

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    async def retire(self) -> None:
        """Close when the requests in flight are answered, for a model that gets no new ones."""
        if self._open:
            self._idle = self._loop.create_future()
            await self._idle
        await self.close()

    async def describe(self) -> dict[str, Any]:
        """What one replica says of itself: see `Model.describe`."""
        answer: dict[str, Any] = await self._describe.remote()
        return answer

    async def describe_all(self) -> list[dict[str, Any]]:
        """`describe` of every replica that is up."""
        answers: list[dict[str, Any]] = (
            await self._handle.options(_by_reference=False).broadcast("describe").results_async()
        )
        return answers

    def _start_a_replica(self) -> None:
        """Serve starts one for a call that waits for it, be it answered or not."""
        if self._starting is None or self._starting.done():
            self._starting = self._loop.create_task(self._described())

    async def _described(self) -> None:
        with suppress(Exception):  # whoever asks next is told what is wrong
            await self.describe()

    async def close(self) -> None:
        """Fail what is still waiting and end the calls."""
        on_their_way = itertools.chain(self._waiting, self._suspects, self._verdicts.values(), *self._calls.values())
        self._fail(list(on_their_way), ReplicaUnavailableError("the model is being unloaded"))
        self._waiting, self._suspects = [], []
        if self._timer is not None:
            self._timer.cancel()
        if self._starting is not None:
            self._starting.cancel()
        if self._trial is not None:
            self._trial.cancel()
        tasks = [*self._calls, *self._verdicts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._handle.shutdown_async()
        forget_classes(self._handle.app_name)

    async def _wake(self, ticket: _Ticket, deadline: float, allowed: float) -> None:
        ticket.wake = self._loop.create_future()
        late = RequestTimeoutError(f"no answer within {allowed:g} s")
        timer = self._loop.call_at(deadline, self._cancel, ticket, late)
        try:
            await ticket.wake
        finally:
            timer.cancel()
            ticket.wake = None

    def _send(self) -> None:
        if len(self._calls) < FREE_CALLS or len(self._waiting) >= MAX_CALL_REQUESTS:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(JOIN_SECONDS, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        replicas, lines = running_replicas(self._handle) or [], dict[str, list[_Ticket]]()
        for ticket in waiting:
            ticket.join(replicas)
            lines.setdefault(ticket.replica, []).append(ticket)
        for line in lines.values():
            while line:
                batch, size = [line.pop(0)], 0
                size = batch[0].size
                while line and len(batch) < MAX_CALL_REQUESTS and size + line[0].size <= MAX_CALL_BYTES:
                    size += line[0].size
                    batch.append(line.pop(0))
                self._start(batch, size)

    def _start(self, batch: list[_Ticket], size: int) -> asyncio.Task[None]:
        call = self._loop.create_task(self._call(batch, size))
        self._calls[call] = batch
        call.add_done_callback(self._ended)
        return call

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.pop(call, None)
        if self._waiting:
            self._flush()

    async def _call(self, batch: list[_Ticket], size: int) -> None:
        from ray.exceptions import RayActorError, RayError
        from ray.serve.exceptions import RayServeException

        alone = batch[0].alone
        handle = (self._alone if alone else self._together)[size > MAX_CALL_BYTES]
        for ticket in batch:
            ticket.attempts += 1
        tickets = {ticket.key: ticket for ticket in batch}
        requests = [(ticket.key, ticket.packet) for ticket in batch]
        stream = handle.remote(requests, self._model, replica=batch[0].replica)
        place: Place | None = None
        try:
            async for data in stream:
                if alone and place is None:
                    place = Place.unpack(data)
                    continue
                for key, outcomes in unpack_outcomes(data):
                    tickets[key].deliver(outcomes)
        except RayActorError:  # the replica died; scoring twice gives the same
            if place is None:
                self._again(batch)
            else:
                self._accuse(batch[0], place)
        except (RayServeException, RayError) as error:
            log.warning("a call to %s failed: %s", self._handle.app_name, type(error).__name__)
            self._fail(batch, ReplicaUnavailableError("the model cannot be reached", retry_after=RETRY_AFTER_SECONDS))
        except asyncio.CancelledError:
            stream.cancel()
            self._fail(batch, ReplicaUnavailableError("the call was cancelled", retry_after=RETRY_AFTER_SECONDS))
            raise
        except Exception as error:
            log.error("a call to %s failed: %s", self._handle.app_name, place_of(error))
            self._fail(batch, InternalError("the call to the model failed"))
        else:
            self._fail(batch, InternalError("the model did not answer every question"))

    def _again(self, batch: list[_Ticket]) -> None:
        """A replica died: what it had goes out once more together, from the next time on one by one and alone."""
        for ticket in batch:
            if ticket.done:
                continue
            ticket.leave()
            if ticket.attempts >= MAX_DEATHS:
                lost = f"{ticket.attempts} replicas in turn were lost before they had answered"
                ticket.fail(ReplicaUnavailableError(lost, retry_after=RETRY_AFTER_SECONDS))
                continue
            if self._retries is not None:
                self._retries.inc()
            ticket.alone = ticket.attempts >= SUSPECT_DEATHS
            (self._suspects if ticket.alone else self._waiting).append(ticket)
        if self._waiting:
            self._send()
        if self._suspects and (self._trial is None or self._trial.done()):
            self._trial = self._loop.create_task(self._try_suspects())

    async def _try_suspects(self) -> None:
        """Send those that may have killed their replicas, each when the one before has been answered."""
        while self._suspects:
            for _ in range(SUSPECT_LOOKS):
                await asyncio.sleep(random.random() * SUSPECT_SECONDS)
                if running_replicas(self._handle):
                    break
            if self._suspects and not (ticket := self._suspects.pop(0)).done:
                ticket.join(running_replicas(self._handle) or [])
                await asyncio.wait([self._start([ticket], ticket.size)])

    def _accuse(self, ticket: _Ticket, place: Place) -> None:
        """Find out whether a request killed the replica that it was alone in, even if its caller goes away meanwhile.

        Ray may take a minute to say so; the other suspects do not wait for it.
        """
        verdict = self._loop.create_task(self._judge(ticket, place))
        self._verdicts[verdict] = ticket
        verdict.add_done_callback(self._verdicts.pop)

    async def _judge(self, ticket: _Ticket, place: Place) -> None:
        from ray.exceptions import RayError

        try:
            lost = await node_lost(place)
        except RayError as error:
            log.warning("Ray does not say how %s ended: %s", place.actor, type(error).__name__)
            lost = True
        if lost:
            self._again([ticket])
        else:
            self._blame(ticket)

    def _blame(self, ticket: _Ticket) -> None:
        self._blamed.add(ticket.request)
        log.error("%s: a request killed a replica alone and is refused from now on", self._name)
        if not ticket.done:
            times = f"{ticket.attempts} replicas in turn died"
            ticket.fail(InferenceFailedError(f"{times} of this request; it is not tried again"))

    @staticmethod
    def _fail(batch: list[_Ticket], error: APIError) -> None:
        for ticket in batch:
            if not ticket.done:
                ticket.fail(error)

    def _cancel(self, ticket: _Ticket, why: APIError) -> None:
        """Nobody waits for it any more."""
        ticket.fail(why)
        for line in (self._waiting, self._suspects):
            if ticket in line:
                line.remove(ticket)
                return
        if ticket.alone:  # it may be waiting for its turn in the replica
            for call, batch in self._calls.items():
                if ticket in batch:
                    call.cancel()
            return
        if not self._cancelled:
            self._loop.call_soon(self._send_cancelled)
        self._cancelled.append(ticket.key)

    def _send_cancelled(self) -> None:
        """To every replica: which one has the request is Serve's secret. Nobody waits for the answer.

        Where there is none Serve holds the calls, and would make them all once there is one: it gets another to start a
        replica for, and those that are nobody's are taken back.
        """
        keys, self._cancelled = self._cancelled, []
        if not running_replicas(self._handle):
            self._start_a_replica()
            for call, batch in list(self._calls.items()):
                if all(ticket.done for ticket in batch):
                    call.cancel()
            return
        self._handle.options(_by_reference=False).broadcast("cancel", keys)._ensure_scheduled()
