"""From log-probabilities to answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sakuradite.engine.backend import OutOfDeviceMemory, Prefix, Read, Row, RowScores
from sakuradite.engine.labels import Labels
from sakuradite.engine.plan import PlannedQuestion
from sakuradite.engine.readout import outcome
from sakuradite.errors import ContextExceededError
from sakuradite.records import RowAnswer, RowFailure


def question(paths: tuple[tuple[int, ...], ...], *scores: RowScores | Exception) -> PlannedQuestion:
    labels = Labels(tuple(map(str, paths)), (), paths)
    rows = tuple(Row((0,), (Read(0, (0,)),)) for _ in scores)
    return PlannedQuestion(7, Prefix(()), rows, labels, 50, dict(enumerate(scores)))


def logs(*probabilities: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, np.float32))


def test_probabilities_are_normalised_and_the_mass_is_what_they_had() -> None:
    found = outcome(question(((1,), (2,), (3,)), (logs(0.3, 0.15, 0.05),)))
    assert isinstance(found, RowAnswer)
    assert found.row == 7
    assert found.input_tokens == 50
    assert found.probabilities == pytest.approx((0.6, 0.3, 0.1), abs=1e-7)
    assert math.fsum(found.probabilities) == pytest.approx(1, abs=1e-15)
    assert found.label_mass == pytest.approx(0.5, abs=1e-7)


def test_labels_of_two_tokens_multiply() -> None:
    paths = ((1, 8), (2, 8), (1, 9), (2, 9))
    first, of_1, of_2 = logs(0.5, 0.25), logs(0.4, 0.2), logs(0.1, 0.9)
    found = outcome(question(paths, (first, of_1), (of_2,)))
    assert isinstance(found, RowAnswer)
    joint = [0.5 * 0.4, 0.25 * 0.1, 0.5 * 0.2, 0.25 * 0.9]
    assert found.label_mass == pytest.approx(sum(joint), abs=1e-7)
    assert found.probabilities == pytest.approx([p / sum(joint) for p in joint], abs=1e-7)


def test_rows_that_come_back_in_another_order_are_told_apart() -> None:
    whole = question(((1, 8), (2, 8)), (logs(0.5, 0.25), logs(0.4)), (logs(0.1),))
    shuffled = question(((1, 8), (2, 8)), (logs(0.5, 0.25), logs(0.4)), (logs(0.1),))
    shuffled.scores = dict(reversed(shuffled.scores.items()))
    assert outcome(shuffled) == outcome(whole)


def test_an_absurd_option_gets_0() -> None:
    """Case 4: thirty options, one at e^-80 of the others: finite and above 0, the sum still 1."""
    scores = np.full(30, math.log(1 / 30), np.float32)
    scores[11] -= 80
    found = outcome(question(tuple((i,) for i in range(30)), (scores,)))
    assert isinstance(found, RowAnswer)
    assert min(found.probabilities) > 0
    assert math.fsum(found.probabilities) == pytest.approx(1, abs=1e-12)


def test_one_option_is_certain() -> None:
    found = outcome(question(((1,),), (logs(0.25),)))
    assert isinstance(found, RowAnswer)
    assert found.probabilities == (1.0,)
    assert found.label_mass == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("scores", "code"),
    [
        ((np.array([np.nan, 0.0], np.float32),), "inference_failed"),
        ((np.array([-1.0, np.nan], np.float32),), "inference_failed"),
        ((np.array([-np.inf, -np.inf], np.float32),), "inference_failed"),
        ((np.array([np.inf, 0.0], np.float32),), "inference_failed"),
        (RuntimeError("of a library, with the caller's text"), "inference_failed"),
        (OutOfDeviceMemory("1 row"), "inference_failed"),
        (ContextExceededError("over"), "context_exceeded"),
    ],
)
def test_what_is_no_number_is_a_failure_of_its_row(scores: RowScores | Exception, code: str) -> None:
    found = outcome(question(((1,), (2,)), scores))
    assert isinstance(found, RowFailure)
    assert found.row == 7
    assert found.error.code == code
    assert "caller's text" not in found.error.message
