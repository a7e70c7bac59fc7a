"""The one thread that owns a model: it loads, compiles, forwards and reads out. Nothing else touches the weights."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Backend
from sakuradite.engine.batching import Queue, Task
from sakuradite.engine.compile import Compiler
from sakuradite.engine.illustrated import Illustrator
from sakuradite.engine.job import Job
from sakuradite.engine.loading import Loader
from sakuradite.engine.observing import Batch, Observer
from sakuradite.engine.pictures import Pictures
from sakuradite.engine.plan import Plan
from sakuradite.engine.probe import capabilities, probe
from sakuradite.engine.readout import outcome
from sakuradite.engine.scoring import ModelLost, Scorer
from sakuradite.engine.tokenizer import FastTokenizer, Tokenizer
from sakuradite.errors import (
    APIError,
    InternalError,
    MissingExtraError,
    ModelLoadFailedError,
    SakuraditeError,
    UnsupportedModelError,
    place_of,
)
from sakuradite.operations import ModelCapabilities
from sakuradite.records import Outcome

logger = logging.getLogger(__name__)

PREPARED_BYTES = (
    256 << 20
)  # pixels of waiting requests; an image of SmolVLM takes up to 53 MB, and 128 requests may wait
SMALL_REQUEST = 65_536  # bytes; smaller ones are compiled as they come, of larger ones one between two forwards

type Post = Callable[[Iterable[tuple[Job, list[Outcome], APIError | None]]], None]


class Worker:
    """A thread with a model. On it are called: `post` with what became of jobs, outcomes or the error of all of it;
    `lost` when the model can answer nothing any more, after which the thread ends."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Path | None,
        load: Loader,
        post: Post,
        lost: Callable[[], None],
        observer: Observer,
    ) -> None:
        self._config, self._checkpoint, self._load, self._post, self._lost = config, checkpoint, load, post, lost
        self._observer = observer
        self._inbox: SimpleQueue[tuple[str, Job | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"model {config.model}", daemon=True)
        self._large: deque[Job] = deque()
        self._illustrated: deque[Job] = deque()
        self._loaded: Callable[[ModelCapabilities | SakuraditeError], None] = lambda result: None
        self.tokens = 0
        """Prompt tokens compiled and not yet answered."""
        self.questions = 0
        """Questions compiled and not yet answered."""
        self.pixels = 0
        """Bytes of prepared images."""
        self._since: float | None = None
        self.refuses_images = ""
        """Why a model that reads images does not get any; empty where it does, and for a model of text alone."""

    def start(self, loaded: Callable[[ModelCapabilities | SakuraditeError], None]) -> None:
        """Load; `loaded` is called on the thread with the capabilities, or with why there is no model."""
        self._loaded = loaded
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Hand over an admitted job."""
        self._inbox.put(("new", job))

    def leave(self, job: Job) -> None:
        """Say that nobody waits for a job any more (`job.gone` is set): its caches go before the next forward."""
        self._inbox.put(("leave", job))

    def stop(self) -> None:
        """End after the forward that is running, freeing the weights. `join` waits for it."""
        self._inbox.put(("stop", None))

    def join(self) -> None:
        """Wait for the thread's end."""
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs. It never ends by itself while the model is wanted."""
        return self._thread.is_alive()

    @property
    def busy(self) -> float:
        """Seconds since the batch or the compilation at hand began; 0 between them."""
        since = self._since  # read once: the thread may clear it at any moment
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        backend: Backend | None = None
        try:
            tokenizer, backend = self._load(self._config, self._checkpoint)
            facts = backend.facts
            allowed = min(self._config.max_input_tokens, facts.context_length)
            self._backend = backend
            illustrator = self._illustrator(tokenizer) if "image" in facts.modalities else None
            self._compiler = Compiler(tokenizer, self._config.model, allowed, illustrator=illustrator)
            backend.set_head(self._compiler.head)
            self._queue = Queue(
                facts.layout, len(self._compiler.head), self._config.max_batch_size, self._config.max_batch_tokens
            )
            self._scorer = Scorer(backend, self._queue, self._compiler.head, self._config.model, self._observer)
            mass = probe(self._compiler, self._queue, self._scorer, backend)
            reads = ("text", "image") if illustrator is not None else ("text",)
            refused = (f"images are refused: {self.refuses_images}",) if self.refuses_images else ()
            found = capabilities(self._config, backend, allowed, mass, (*tokenizer.warnings, *refused), reads)
        except BaseException as error:  # a panic in Rust is no Exception
            if backend is not None:
                backend.close()
            self._loaded(self._load_failure(error))
            return
        self._loaded(found)
        try:
            while self._receive():
                self._since = time.monotonic()
                self._forward()
                self._since = None
        except BaseException as error:
            logger.error("the worker of %s cannot answer any more and ends: %s", self._config.model, place_of(error))
            self._lost()
        finally:
            backend.close()

    def _illustrator(self, tokenizer: Tokenizer) -> Illustrator | None:
        """What puts images into prompts, or None where the processor is not to be had: text still works."""
        assert isinstance(tokenizer, FastTokenizer)
        assert self._checkpoint is not None
        try:
            return Illustrator(tokenizer, Pictures(self._checkpoint, tokenizer))
        except (UnsupportedModelError, MissingExtraError) as error:
            self.refuses_images = str(error)
            return None

    def _load_failure(self, error: BaseException) -> SakuraditeError:
        """What the caller of a failed load gets, without the frames that would keep half-loaded weights alive."""
        if not isinstance(error, SakuraditeError):
            logger.error("loading %s failed", self._config.model, exc_info=error)
            cause = error.__cause__ if isinstance(error, ModelLost) and error.__cause__ else error
            return ModelLoadFailedError(f"{self._config.model} could not be loaded: {type(cause).__name__}: {cause}")
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)

    def _receive(self) -> bool:
        """Take in what has come, waiting only when there is nothing to do. False means to stop."""
        inbox = self._inbox
        new: list[Job] = []
        while True:
            if not inbox.empty() or not (new or self._large or self._illustrated or len(self._queue)):
                kind, job = inbox.get()
                if job is None:
                    return False
                if kind == "new":
                    small = new if job.size <= SMALL_REQUEST else self._large
                    (self._illustrated if job.request.images else small).append(job)
                else:
                    self._end(job)
            else:
                break
        if self._large:
            new.append(self._large.popleft())
        # One with images between two forwards, while those that wait hold few pixels or there is nothing else to do.
        if self._illustrated and (self.pixels < PREPARED_BYTES or not (new or len(self._queue))):
            new.append(self._illustrated.popleft())
        if new:
            self._since = time.monotonic()
            self._compile(new)
            self._since = None
        return True

    def _compile(self, jobs: list[Job]) -> None:
        """Compile new jobs together and put their rows into the queue."""
        started = time.monotonic()
        jobs = [job for job in jobs if not job.gone and job.deadline > started]
        try:
            plans: list[Plan | APIError] = self._compiler.compile([job.request for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                # The message may quote the request, so the log has the error's class and place alone.
                place = traceback.extract_tb(error.__traceback__)[-1]
                kind = type(error).__name__
                logger.error("compiling a request for %s failed: %s in %s", self._config.model, kind, place)
            plans = [InternalError("the request could not be compiled")]
        if len(plans) < len(jobs):  # one at a time, so that only the culprit fails
            for job in jobs:
                self._compile([job])
            return
        ended = time.monotonic()
        results: list[tuple[Job, list[Outcome], APIError | None]] = []
        for job, plan in zip(jobs, plans, strict=True):
            job.account.compiling, job.account.compiled = started, ended
            if isinstance(plan, APIError):
                results.append((job, [], plan))
                continue
            job.unanswered = len(plan.questions)
            job.tokens = sum(question.input_tokens for question in plan.questions)
            self.tokens += job.tokens
            self.questions += job.unanswered
            job.account.input_tokens = job.tokens
            images = {id(i): i for q in plan.questions if (i := q.prefix.extras.get("images")) is not None}
            job.pixels = sum(one.nbytes for one in images.values())
            self.pixels += job.pixels
            job.prefixes = list({id(q.prefix): q.prefix for q in plan.questions}.values())
            if plan.failures:
                results.append((job, list(plan.failures), None))
            self._queue.add(job, plan.questions)
        self._observer.compiled(len(jobs), ended - started)
        if results:
            self._post(results)

    def _forward(self) -> None:
        """One batch: forward, read out, hand the outcomes back."""
        batch = self._queue.take(time.monotonic())
        if not batch:
            return
        load = self._queue.taken
        seen = Batch(time.monotonic(), load.rows, load.prompt, load.tokens, load.padding)
        found: dict[int, tuple[Job, list[Outcome], APIError | None]] = {}
        try:
            scored = self._scorer.score(batch)
            self._note(batch, seen)
            for task in scored:
                job = task.work
                assert isinstance(job, Job)
                if id(job) not in found:
                    found[id(job)] = (job, [], None)
                found[id(job)][1].append(outcome(task.question))
                if len(task.question.rows) > 1:  # its prefix is its own, and done with
                    self._backend.release(task.question.prefix)
        except ModelLost:
            raise
        except Exception as defect:
            logger.error("a batch of %d rows failed on %s: %s", len(batch), self._config.model, place_of(defect))
            found = {
                id(task.work): (task.work, [], InternalError("the batch of this request failed"))
                for task in batch
                if isinstance(task.work, Job)
            }
        for job, outcomes, error in found.values():
            job.unanswered -= len(outcomes)
            self.questions -= len(outcomes)
            job.gone = job.gone or error is not None
            if error is not None or not job.unanswered:
                self._end(job)
        self._post(found.values())

    def _note(self, batch: list[Task], seen: Batch) -> None:
        """Tell of a batch that has its scores, before its requests may end."""
        seen.seconds = time.monotonic() - seen.started
        for task in batch:
            assert isinstance(task.work, Job)
            batches = task.work.account.batches
            if not batches or batches[-1] is not seen:
                batches.append(seen)
        self._observer.forwarded(seen)

    def _end(self, job: Job) -> None:
        """Free what is held for a job."""
        for prefix in job.prefixes:
            self._backend.release(prefix)
        job.prefixes = []
        self.pixels -= job.pixels
        job.pixels = 0
        self.tokens -= job.tokens
        job.tokens = 0
        self.questions -= job.unanswered
        job.unanswered = 0
