"""The one thread that owns a model: it loads, compiles, forwards and reads out. Nothing else touches the weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Backend, Group, OutOfDeviceMemory, RowScores
from sakuradite.engine.batching import Queue, Task
from sakuradite.engine.compile import Compiler
from sakuradite.engine.job import Job
from sakuradite.engine.loading import Loader
from sakuradite.engine.readout import outcome
from sakuradite.errors import APIError, InternalError, ModelLoadFailedError, SakuraditeError
from sakuradite.operations import ModelCapabilities
from sakuradite.records import Candidate, Outcome, QuestionRecord, RequestRecord, RowAnswer

logger = logging.getLogger(__name__)

LOW_LABEL_MASS = 0.01  # below this the model hardly considers answering with a label, and answers mean little
PROBE = RequestRecord(
    "probe",
    ("The parcel arrived on Monday, two days late, and the box was damaged.",),
    (
        QuestionRecord("noul", ("The parcel was late.",), (Candidate("true"), Candidate("false"))),
        QuestionRecord("choice", ("What happened?",), tuple(Candidate(n) for n in ("on time", "late", "lost"))),
        QuestionRecord(
            "score",
            ("How bad was it?",),
            tuple(Candidate(str(i), (t,)) for i, t in enumerate(("fine", "bad", "awful"))),
        ),
    ),
)

type Post = Callable[[Iterable[tuple[Job, list[Outcome], APIError | None]]], None]


class Worker:
    """A thread with a model. `post` is called on it with what became of jobs: outcomes, or the error of all of it."""

    def __init__(self, config: ModelConfig, checkpoint: Path | None, load: Loader, post: Post) -> None:
        self._config, self._checkpoint, self._load, self._post = config, checkpoint, load, post
        self._inbox: SimpleQueue[tuple[str, Job | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"model {config.model}", daemon=True)
        self._loaded: Callable[[ModelCapabilities | Exception], None] = lambda result: None
        self.tokens = 0
        """Prompt tokens compiled and not yet answered."""

    def start(self, loaded: Callable[[ModelCapabilities | Exception], None]) -> None:
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

    def _run(self) -> None:
        backend: Backend | None = None
        try:
            tokenizer, backend = self._load(self._config, self._checkpoint)
            facts = backend.facts
            allowed = min(self._config.max_input_tokens, facts.context_length)
            self._backend = backend
            self._compiler = Compiler(tokenizer, self._config.model, allowed)
            backend.set_head(self._compiler.head)
            self._queue = Queue(
                facts.layout, len(self._compiler.head), self._config.max_batch_size, self._config.max_batch_tokens
            )
            capabilities = self._probe(tokenizer.warnings, allowed)
        except Exception as error:
            if not isinstance(error, SakuraditeError):
                logger.exception("loading %s failed", self._config.model)
                error = ModelLoadFailedError(
                    f"{self._config.model} could not be loaded: {type(error).__name__}: {error}"
                )
            if backend is not None:
                backend.close()
            self._loaded(error)
            return
        self._loaded(capabilities)
        try:
            while self._receive():
                self._forward()
        finally:
            backend.close()

    def _probe(self, warnings: tuple[str, ...], allowed: int) -> ModelCapabilities:
        """Score a small request, and say what the model can do and what a user should know about it."""
        facts, config = self._backend.facts, self._config
        job = Job(request=PROBE)
        (plan,) = self._compiler.compile([PROBE])
        if isinstance(plan, APIError):
            raise plan
        answers: list[Outcome] = []
        self._queue.add(job, plan.questions)
        while batch := self._queue.take(0.0):
            answers += [outcome(task.question) for task in self._score(batch)]
        for question in plan.questions:
            self._backend.release(question.prefix)
        masses = [found.label_mass for found in answers if isinstance(found, RowAnswer)]
        notes = [*facts.warnings, *warnings]
        mass = min(masses, default=None)
        if plan.questions and len(masses) < len(answers):
            raise ModelLoadFailedError(f"{config.model} gives no finite probabilities: its probe at load failed")
        if mass is not None and mass < LOW_LABEL_MASS:
            notes.append(
                f"the model gave its labels only {mass:.2%} of the probability in a probe: it hardly answers in this "
                "form, so do not rely on its probabilities"
            )
        if allowed > config.max_batch_tokens:
            notes.append(
                f"a question may have {allowed} tokens and a batch has {config.max_batch_tokens}: longer ones run alone"
            )
        for note in notes:
            logger.warning("%s: %s", config.model, note)
        return ModelCapabilities(
            architecture=facts.architecture,
            backend=config.backend if config.backend != "auto" else type(self._backend).__module__.split(".")[2],
            device=facts.device,
            dtype=facts.dtype,
            context_length=facts.context_length,
            max_input_tokens=allowed,
            max_questions=config.max_questions,
            modalities=facts.modalities,
            parameters=facts.parameters,
            weight_bytes=facts.weight_bytes,
            prefix_reuse=f"{facts.layout}: {facts.layout_reason}",
            label_mass=mass,
            warnings=tuple(notes),
        )

    def _receive(self) -> bool:
        """Take in what has come, waiting only when there is nothing to do. False means to stop."""
        inbox = self._inbox
        new: list[Job] = []
        while True:
            if not inbox.empty() or not (new or len(self._queue)):
                kind, job = inbox.get()
                if job is None:
                    return False
                if kind == "new":
                    new.append(job)
                else:
                    self._end(job)
            else:
                break
        if new:
            self._compile(new)
        return True

    def _compile(self, jobs: list[Job]) -> None:
        """Compile new jobs together and put their rows into the queue."""
        now = time.monotonic()
        jobs = [job for job in jobs if not job.gone and job.deadline > now]
        try:
            plans = self._compiler.compile([job.request for job in jobs])
        except Exception:
            if len(jobs) > 1:  # one at a time, so that only the culprit fails
                for job in jobs:
                    self._compile([job])
                return
            logger.exception("compiling a request for %s failed", self._config.model)
            plans = [InternalError("the request could not be compiled")]
        results: list[tuple[Job, list[Outcome], APIError | None]] = []
        for job, plan in zip(jobs, plans, strict=True):
            if isinstance(plan, APIError):
                results.append((job, [], plan))
                continue
            job.unanswered = len(plan.questions)
            job.tokens = sum(question.input_tokens for question in plan.questions)
            self.tokens += job.tokens
            job.prefixes = list({id(q.prefix): q.prefix for q in plan.questions}.values())
            if plan.failures:
                results.append((job, list(plan.failures), None))
            self._queue.add(job, plan.questions)
        if results:
            self._post(results)

    def _forward(self) -> None:
        """One batch: forward, read out, hand the outcomes back."""
        batch = self._queue.take(time.monotonic())
        if not batch:
            return
        found: dict[int, tuple[Job, list[Outcome], APIError | None]] = {}
        try:
            for task in self._score(batch):
                job = task.work
                assert isinstance(job, Job)
                if id(job) not in found:
                    found[id(job)] = (job, [], None)
                found[id(job)][1].append(outcome(task.question))
        except Exception:
            logger.exception("a batch of %d rows failed on %s", len(batch), self._config.model)
            found = {
                id(task.work): (task.work, [], InternalError("the batch of this request failed"))
                for task in batch
                if isinstance(task.work, Job)
            }
        for job, outcomes, error in found.values():
            job.unanswered -= len(outcomes)
            job.gone = job.gone or error is not None
            if error is not None or not job.unanswered:
                self._end(job)
        self._post(found.values())

    def _end(self, job: Job) -> None:
        """Free what is held for a job."""
        for prefix in job.prefixes:
            self._backend.release(prefix)
        job.prefixes = []
        self.tokens -= job.tokens
        job.tokens = 0

    def _score(self, batch: list[Task]) -> list[Task]:
        """Score the batch's rows; for each question that is complete with it, the task that completed it."""
        groups: dict[int, list[Task]] = {}
        for task in batch:
            groups.setdefault(id(task.question.prefix), []).append(task)
        complete: list[Task] = []
        self._score_tasks(list(groups.values()), complete)
        return complete

    def _score_tasks(self, groups: list[list[Task]], complete: list[Task]) -> None:
        """Score tasks grouped by prefix, in halves where the device is too small or a row spoils the others.

        A row that fails alone keeps its error as its scores.
        """
        scores: list[list[RowScores | Exception]]
        try:
            scores = self._backend.score(
                [
                    Group(tasks[0].question.prefix, [task.question.rows[task.number] for task in tasks])
                    for tasks in groups
                ]
            )
        except Exception as error:
            rows = sum(map(len, groups))
            if not isinstance(error, OutOfDeviceMemory | APIError):
                logger.exception("a forward of %d rows failed on %s", rows, self._config.model)
            if rows > 1:
                for half in _halves(groups, rows // 2):
                    self._score_tasks(half, complete)
                return
            scores = [[error]]
        for tasks, found in zip(groups, scores, strict=True):
            for task, row in zip(tasks, found, strict=True):
                task.question.scores[task.number] = row
                if len(task.question.scores) == len(task.question.rows):
                    complete.append(task)


def _halves(groups: list[list[Task]], size: int) -> tuple[list[list[Task]], list[list[Task]]]:
    """The first `size` tasks and the others, still by prefix."""
    first: list[list[Task]] = []
    second: list[list[Task]] = []
    for tasks in groups:
        cut = min(size, len(tasks))
        size -= cut
        if cut:
            first.append(tasks[:cut])
        if cut < len(tasks):
            second.append(tasks[cut:])
    return first, second
