"""Forwards that fail in parts: a batch too large is halved, a row that spoils its batch is found and fails alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sakuradite.engine.backend import Backend, Group, OutOfDeviceMemory, Prefix, Read, Row, RowScores
from sakuradite.engine.batching import Queue, Task
from sakuradite.engine.observing import NOBODY, Observer
from sakuradite.errors import APIError, place_of

logger = logging.getLogger(__name__)


class ModelLost(Exception):
    """The model can answer nothing any more."""


class Scorer:
    """Scores batches on a backend. `head` is what every prefix starts with, `model` is for the log."""

    def __init__(
        self, backend: Backend, queue: Queue, head: Sequence[int], model: str, observer: Observer = NOBODY
    ) -> None:
        self._backend, self._queue, self._head, self._model = backend, queue, tuple(head), model
        self._observer = observer

    def score(self, batch: list[Task]) -> list[Task]:
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
        scores = self._attempt(groups)
        if isinstance(scores, Exception):
            rows = sum(map(len, groups))
            if rows > 1:
                for half in _halves(groups, rows // 2):
                    self._score_tasks(half, complete)
                return
            if not isinstance(scores, OutOfDeviceMemory | APIError):
                logger.error("a row failed on %s: %s", self._model, place_of(scores))
                self._check()
            scores = [[scores.with_traceback(None)]]
        for tasks, found in zip(groups, scores, strict=True):
            for task, row in zip(tasks, found, strict=True):
                task.question.scores[task.number] = row
                if len(task.question.scores) == len(task.question.rows):
                    complete.append(task)

    def _attempt(self, groups: list[list[Task]]) -> list[list[RowScores | Exception]] | Exception:
        """The scores of one forward, or why there are none."""
        rows = [[task.question.rows[task.number] for task in tasks] for tasks in groups]
        try:
            scores = self._backend.score(
                [Group(tasks[0].question.prefix, some) for tasks, some in zip(groups, rows, strict=True)]
            )
        except OutOfDeviceMemory as error:
            self._queue.shrink()
            self._observer.halved()
            return OutOfDeviceMemory(str(error))  # anew: a traceback would keep the tensors of the forward alive
        except Exception as error:
            return error
        self._queue.fitted()
        return scores

    def _check(self) -> None:
        """After a row failed alone: was it the row, or can the model (a broken CUDA context) answer nothing?"""
        group = Group(Prefix(self._head), [Row((self._head[-1],), (Read(0, (0,)),))])
        try:
            self._backend.score([group])
        except OutOfDeviceMemory:
            pass  # full, not broken
        except Exception as error:
            raise ModelLost(f"{self._model} failed a forward that it did before") from error
        finally:
            self._backend.release(group.prefix)


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
