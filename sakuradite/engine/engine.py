"""A model that answers: admission, deadlines and cancellation on the event loop, everything else on its worker thread.

    engine = Engine(config, checkpoint)
    await engine.start()
    async for outcomes in engine.decide(request): ...
    await engine.stop(drain=10)

Errors of the whole request are raised by `decide`, those of one question are an outcome of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

from sakuradite.config import ModelConfig
from sakuradite.engine.job import Job
from sakuradite.engine.loading import Loader, load
from sakuradite.engine.observing import NOBODY, Account, Observer
from sakuradite.engine.worker import Worker
from sakuradite.errors import (
    APIError,
    CapacityExceededError,
    ModelLoadingError,
    ReplicaUnavailableError,
    RequestTimeoutError,
    SakuraditeError,
    UnsupportedModelError,
    ValidationError,
)
from sakuradite.operations import ModelCapabilities
from sakuradite.records import Outcome, Prose, RequestRecord

BATCH_TIMEOUTS = 5  # a batch may outlive its callers: on a CPU 8,192 tokens of a large model take many minutes


class Engine:
    """One model of this process. Nothing heavy happens before `start`; all methods belong to one event loop.

    `checkpoint` is a local folder, None only for the fake backend.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Path | None, *, load: Loader = load, observer: Observer = NOBODY
    ) -> None:
        self.config = config
        self._observer = observer
        self.capabilities: ModelCapabilities | None = None
        self.pending_requests = 0
        self.pending_bytes = 0
        self._longest_batch = config.max_batch_seconds or BATCH_TIMEOUTS * config.timeout
        self._broken = False  # the model can answer nothing any more; only a new process helps
        self._worker = Worker(config, checkpoint, load, self._post, self._lost, observer)
        self._jobs: set[Job] = set()
        self._mail: deque[tuple[Job, list[Outcome], APIError | None]] = deque()
        self._called = False  # a delivery is on its way to the loop
        self._stopping = False
        self._idle: asyncio.Future[None] | None = None
        self._seconds = 0.1  # a finished request's time between two, smoothed: for Retry-After
        self._last_end = 0.0

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens of compiled questions that have no answer yet."""
        return self._worker.tokens

    @property
    def pending_questions(self) -> int:
        """Compiled questions that have no answer yet."""
        return self._worker.questions

    @property
    def alive(self) -> bool:
        """Whether the worker thread runs and gets on; when it does not, this engine never answers again.

        It counts as stuck when one batch takes longer than `max_batch_seconds`: those who asked have had their 504.
        """
        return self._worker.alive and not self._broken and self._worker.busy < self._longest_batch

    @property
    def computing(self) -> bool:
        """Whether a batch is being compiled or computed, be it for somebody or not."""
        return self._worker.busy > 0

    async def start(self) -> ModelCapabilities:
        """Load the model on its thread and probe it. Raises what kept it from loading, with its own class: an
        APIError, or MissingExtraError."""
        self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[ModelCapabilities] = self._loop.create_future()

        def settle(result: ModelCapabilities | SakuraditeError) -> None:
            if not loaded.done():
                if isinstance(result, SakuraditeError):
                    loaded.set_exception(result)
                else:
                    loaded.set_result(result)

        def report(result: ModelCapabilities | SakuraditeError) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(settle, result)

        self._worker.start(report)
        self.capabilities = await loaded
        return self.capabilities

    async def decide(self, request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        """The outcomes of a request's questions, in groups as batches finish, each question exactly once.

        Closing the generator cancels what has not started. Raises, at the first step, ModelLoadingError,
        ReplicaUnavailableError, ValidationError (too many questions), UnsupportedModelError (images) or
        CapacityExceededError; at any step RequestTimeoutError or ReplicaUnavailableError.
        """
        try:
            job = self._admit(request)
        except APIError as error:
            now = time.monotonic()
            self._observer.ended(request, Account(now, ended=now, code=error.code))
            raise
        try:
            while True:
                if job.groups:
                    outcomes, job.groups = job.groups, []
                    yield outcomes
                elif job.error is not None:
                    raise job.error
                elif job.finished:
                    return
                else:
                    job.waiter = self._loop.create_future()
                    await job.waiter
        finally:
            self._leave(job)

    async def stop(self, drain: float) -> None:
        """Take no more requests, wait up to `drain` seconds for those here, fail the rest, free the model.

        A forward that is already running is waited for.
        """
        self._stopping = True
        if self._jobs and drain > 0:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle], timeout=drain)
        for job in list(self._jobs):
            self._fail(job, ReplicaUnavailableError("the model is being unloaded", retry_after=1.0))
        self._worker.stop()
        if self.capabilities is not None:  # else it may be loading for minutes; it ends by itself after that
            await asyncio.to_thread(self._worker.join)

    def _admit(self, request: RequestRecord) -> Job:
        """A job in the worker's hands, or the error that refuses it."""
        config = self.config
        if self._stopping:
            raise ReplicaUnavailableError(f"{config.model} is being unloaded", retry_after=1.0)
        if self._broken:
            raise ReplicaUnavailableError(f"{config.model} has failed and is restarting", retry_after=1.0)
        if self.capabilities is None:
            raise ModelLoadingError(f"{config.model} is not loaded yet", retry_after=1.0)
        questions = len(request.questions)
        if questions > config.max_questions:
            raise ValidationError(
                f"{questions} questions; {config.model} takes at most {config.max_questions} in a request "
                "(max_questions). Split them over several requests",
                param="questions",
            )
        if request.images and "image" not in self.capabilities.modalities:
            why = f": {self._worker.refuses_images}" if self._worker.refuses_images else ""
            raise UnsupportedModelError(f"images not supported by {config.model}{why}", param="images")
        size = request_bytes(request)
        if self.pending_requests >= config.max_pending_requests:
            raise CapacityExceededError(
                f"{config.model} has {self.pending_requests} requests waiting (max_pending_requests); try again later",
                retry_after=self._retry_after(),
            )
        if self._jobs and self.pending_bytes + size > config.max_pending_bytes:
            raise CapacityExceededError(
                f"{config.model} has {self.pending_bytes} bytes of requests waiting and this one brings {size}; "
                f"max_pending_bytes is {config.max_pending_bytes}; try again later",
                retry_after=self._retry_after(),
            )
        timeout = config.timeout if request.timeout is None else min(request.timeout, config.timeout)
        if timeout <= 0:
            raise _too_late(timeout)
        now = time.monotonic()
        job = Job(now + timeout, request=request, size=size, awaited=questions, finished=not questions)
        job.account = Account(now)
        self.pending_requests += 1
        self.pending_bytes += size
        self._jobs.add(job)
        job.timer = self._loop.call_later(timeout, self._fail, job, _too_late(timeout))
        self._worker.submit(job)
        return job

    def _leave(self, job: Job) -> None:
        """The consumer is done with a job, or has gone."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self.pending_requests -= 1
        self.pending_bytes -= job.size
        if job.timer is not None:
            job.timer.cancel()
        if not job.gone:
            job.gone = True
            if job.awaited:
                self._worker.leave(job)
        account = job.account
        account.ended = time.monotonic()
        account.code = job.error.code if job.error else "" if job.finished else "cancelled"
        self._observer.ended(job.request, account)
        now = self._loop.time()
        self._seconds += 0.05 * (min(1.0, now - self._last_end) - self._seconds)
        self._last_end = now
        if self._idle is not None and not self._jobs and not self._idle.done():
            self._idle.set_result(None)

    def _fail(self, job: Job, error: APIError) -> None:
        """End a job with an error; what has not started is dropped by the worker."""
        if job.error is None and not job.finished:
            job.error = error
            job.gone = True
            self._worker.leave(job)
            job.wake()

    def _post(self, results: Iterable[tuple[Job, list[Outcome], APIError | None]]) -> None:
        """On the worker thread: hand results to the loop, with one call for all that gather before it runs."""
        self._mail.extend(results)
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop has been closed: nobody is left to tell
                self._mail.clear()

    def _deliver(self) -> None:
        """On the loop: give each job its outcomes."""
        self._called = False
        mail = self._mail
        while mail:
            job, outcomes, error = mail.popleft()
            if job.error is not None:
                continue
            job.groups += outcomes
            job.awaited -= len(outcomes)
            job.finished = job.awaited <= 0
            job.error = error
            job.wake()

    def _lost(self) -> None:
        """On the worker thread: the model is of no use any more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_all)

    def _fail_all(self) -> None:
        self._broken = True
        for job in list(self._jobs):
            self._fail(
                job, ReplicaUnavailableError(f"{self.config.model} has failed and is restarting", retry_after=1.0)
            )

    def _retry_after(self) -> float:
        """Seconds until about half of the queue is done, from the recent pace; between 1 and 30."""
        return min(30.0, max(1.0, round(self._seconds * self.pending_requests / 2, 1)))


def request_bytes(request: RequestRecord) -> int:
    """What a request counts for in admission: its text in UTF-8 and its images as they came.

    Raises ValidationError where the text names an image that the request does not have.
    """
    images = len(request.images)
    size = _prose_bytes(request.state, images) + sum(map(len, request.images))
    for question in request.questions:
        size += _prose_bytes(question.instructions, images)
        for candidate in question.candidates:
            size += len(candidate.name) + _prose_bytes(candidate.description, images)
    return size


def _prose_bytes(prose: Prose | None, images: int) -> int:
    if prose is None:
        return 0
    size = 0
    for part in prose:
        if isinstance(part, str):
            size += len(part) if part.isascii() else len(part.encode(errors="surrogatepass"))
        elif not 0 <= part < images:
            raise ValidationError(f"image {part} is named and the request has {images}", param="images")
    return size


def _too_late(timeout: float) -> RequestTimeoutError:
    return RequestTimeoutError(f"no complete answer within the deadline of {timeout:g} s; the work was cancelled")
