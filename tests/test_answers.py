"""Each number in an answer, against the fixtures of the contract."""

import pytest

from sakuradite.answers import ChoiceAnswer, DecisionResult, choice_confidence, expected_score, result, score_confidence
from sakuradite.questions import Choice, Noul, Score
from sakuradite.records import RowAnswer

NFC, NFD = "caf\u00e9", "cafe\u0301"  # two options that look alike


@pytest.mark.parametrize(
    ("p", "confidence"),
    [
        ([0.88, 0.12], 0.76),
        ([0.8, 0.1, 0.1], 0.70),
        ([0.75, 0.25], 0.50),
        ([0.5, 0.5], 0),
        ([0.6, 0.3, 0.1], 0.4),
        ([1.0], 1),
    ],
)
def test_choice_confidence(p: list[float], confidence: float) -> None:
    assert choice_confidence(p) == pytest.approx(confidence, abs=1e-12)


@pytest.mark.parametrize(
    ("p", "confidence"),
    [
        ([0, 0.95, 0.05], 0.925),
        ([0.1, 0.1, 0.8], 0.55),
        ([0.25, 0.5, 0.25], 0.25),
        ([0.5, 0, 0.5], 0),
        ([0, 0, 0, 0.1, 0.9], 11 / 12),
        ([1.0], 1),
    ],
)
def test_score_confidence(p: list[float], confidence: float) -> None:
    assert score_confidence(p) == pytest.approx(confidence, abs=1e-12)


def test_score_confidence_takes_the_first_of_tied_levels() -> None:
    assert score_confidence([0.45, 0.45, 0.1]) == pytest.approx(1 - (0.45 + 2 * 0.1) / (2 / 3))
    assert score_confidence([0.1, 0.45, 0.45]) == pytest.approx(1 - (0.1 + 0.45) / (2 / 3))


def test_expected_score_is_the_mean_position() -> None:
    assert expected_score([0.1, 0.1, 0.8]) == pytest.approx(1.7)


def test_a_result_keeps_order_names_and_legend() -> None:
    questions: dict[str, Noul | Choice | Score] = {
        "late?": Noul(instructions="It is late."),
        "team": Choice(criteria={NFC: None, NFD: "decomposed"}),
        "urgency": Score(criteria=["low", {"level": "high"}]),
    }
    rows = {
        2: RowAnswer(2, (0.25, 0.75), 0.9, 30),
        0: RowAnswer(0, (0.9, 0.1), 0.8, 10),
        1: RowAnswer(1, (0.3, 0.7), 0.7, 20),
    }
    answered = result("m", questions, rows)
    assert list(answered.answers) == ["late?", "team", "urgency"]
    assert answered.nouls["late?"].noul == 0.9
    assert answered.choices["team"].choice == NFD
    assert answered.choices["team"].probabilities == {NFC: 0.3, NFD: 0.7}
    assert answered.scores["urgency"].legend == {"0": "low", "1": {"level": "high"}}
    assert answered.scores["urgency"].score == 0.75
    assert answered.scores["urgency"].x_label_mass == 0.9
    assert answered.usage.model_dump() == {"input_tokens": 60, "output_tokens": 0}
    assert DecisionResult.model_validate_json(answered.model_dump_json()) == answered


def test_the_first_of_tied_options_is_chosen() -> None:
    answered = result("m", {"q": Choice(criteria={"b": None, "a": None})}, {0: RowAnswer(0, (0.5, 0.5), 1.0, 1)})
    assert isinstance(answered.answers["q"], ChoiceAnswer)
    assert answered.answers["q"].choice == "b"
