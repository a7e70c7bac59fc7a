"""From log-probabilities to an answer: normalised over the labels, with the mass that they had together."""

from __future__ import annotations

from math import exp, fsum, isfinite

from sakuradite.engine.backend import OutOfDeviceMemory
from sakuradite.engine.plan import PlannedQuestion
from sakuradite.errors import APIError, InferenceFailedError
from sakuradite.records import Outcome, RowAnswer, RowFailure


def outcome(question: PlannedQuestion) -> Outcome:
    """The answer of a question all of whose rows have come back, or its failure when one of them failed."""
    for scores in question.scores.values():
        if isinstance(scores, Exception):
            return RowFailure(question.index, failure(scores).record())
    logs = _label_logs(question)
    top = max(logs, default=float("nan"))
    if not isfinite(top) or any(log != log for log in logs):
        error = InferenceFailedError("the model gave no usable probability to any label (its output was not finite)")
        return RowFailure(question.index, error.record())
    weights = [exp(log - top) for log in logs]
    total = fsum(weights)
    mass = min(1.0, total * exp(top))
    return RowAnswer(question.index, tuple([w / total for w in weights]), mass, question.input_tokens)


def failure(error: Exception) -> APIError:
    """The API error for what went wrong in a forward. Its text is the engine's own: a library's may quote input."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, OutOfDeviceMemory):
        return InferenceFailedError("this question alone does not fit the device's memory; shorten it")
    return InferenceFailedError(f"the forward pass failed on this question ({type(error).__name__})")


def _label_logs(question: PlannedQuestion) -> list[float]:
    """Per label its log-probability: log p(first), plus log p(second | first) for labels of two tokens."""
    scores = [question.scores[number] for number in range(len(question.rows))]
    reads = [read for row in scores if isinstance(row, tuple) for read in row]
    if len(reads) == 1:
        logs: list[float] = reads[0].tolist()
        return logs
    labels = question.labels
    first_logs = reads[0].tolist()
    found: dict[tuple[int, ...], float] = {}
    for branch, first in enumerate(labels.firsts):
        seconds = [path for path in labels.paths if path[0] == first]
        for path, log in zip(seconds, reads[branch + 1].tolist(), strict=True):
            found[path] = first_logs[branch] + log
    return [found[path] for path in labels.paths]
