"""What a user may write, and the text that the model gets to see of it."""

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from sakuradite.errors import ErrorRecord, FieldProblem
from sakuradite.questions import NEUTRAL_INSTRUCTIONS, Choice, Noul, Question, Score, question_record, render
from sakuradite.records import (
    Candidate,
    Outcome,
    QuestionRecord,
    RequestRecord,
    RowAnswer,
    RowFailure,
    pack_outcomes,
    pack_request,
    unpack_outcomes,
    unpack_request,
)

QUESTION: TypeAdapter[Any] = TypeAdapter(Question)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("as it is\n", "as it is\n"),
        ({"b": 1, "a": [True, None, "é"]}, '{"b":1,"a":[true,null,"é"]}'),
        ([2**70, -(2**70), 2**63, 0.1], "[1180591620717411303424,-1180591620717411303424,9223372036854775808,0.1]"),
        ({"deep": {"id": 10**400}}, '{"deep":{"id":1' + "0" * 400 + "}}"),
    ],
)  # fmt: skip
def test_content_is_rendered_compactly_in_the_callers_order(content: Any, text: str) -> None:
    assert render(content) == text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"a": math.nan}, "finite"),
        ([1e999], "finite"),
        ([-math.inf], "finite"),
        ({1: "a"}, "keys"),
        ("\ud800", "surrogate at character 0"),
        (["\udfff"], "surrogate"),
        ({"a": {1, 2}}, "set is not a JSON value"),
        (nested(101), "deeper than 100"),
    ],
)
def test_what_json_cannot_hold_is_refused(content: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        render(content)


def test_a_hundred_levels_pass() -> None:
    assert render(nested(100)) == "[" * 100 + "1" + "]" * 100


@pytest.mark.parametrize(
    ("question", "record"),
    [
        (Noul(instructions="Late?"), QuestionRecord("noul", ("Late?",), (Candidate("true"), Candidate("false")))),
        (Noul(), QuestionRecord("noul", (NEUTRAL_INSTRUCTIONS,), (Candidate("true"), Candidate("false")))),
        (
            Noul(criteria={"false": {"x": 1}}),
            QuestionRecord("noul", None, (Candidate("true"), Candidate("false", ('{"x":1}',)))),
        ),
        (
            Choice(instructions=["pick"], criteria={"a": None, "b": "about b"}),
            QuestionRecord("choice", ('["pick"]',), (Candidate("a"), Candidate("b", ("about b",)))),
        ),
        (
            Score(criteria=["low", {"l": 2}]),
            QuestionRecord("score", None, (Candidate("0", ("low",)), Candidate("1", ('{"l":2}',)))),
        ),
    ],
)
def test_question_records(question: Noul | Choice | Score, record: QuestionRecord) -> None:
    assert question_record(question) == record


@pytest.mark.parametrize(
    "body",
    [
        {"type": "noul", "instruction": "typo"},
        {"type": "noul", "criteria": {"yes": "a"}},
        {"type": "choice"},
        {"type": "choice", "criteria": {}},
        {"type": "choice", "criteria": {str(i): None for i in range(256)}},
        {"type": "score", "criteria": []},
        {"type": "score", "criteria": [None]},
        {"type": "score", "criteria": {"0": "low"}},
        {"type": "box"},
    ],
)
def test_malformed_questions_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        QUESTION.validate_python(body)


def test_255_options_and_levels_pass() -> None:
    assert (
        len(QUESTION.validate_python({"type": "choice", "criteria": {str(i): None for i in range(255)}}).criteria)
        == 255
    )
    assert len(QUESTION.validate_python({"type": "score", "criteria": [str(i) for i in range(255)]}).criteria) == 255


def test_records_survive_the_way_to_another_process() -> None:
    choice = question_record(Choice(criteria={"é": None, "b": "x"}))
    noul = QuestionRecord("noul", None, (Candidate("true"), Candidate("false", (0,))))
    request = RequestRecord("r1", ("before ", 0, " after"), (choice, noul), (b"\x89PNG",), 1.5)
    assert unpack_request(pack_request(request)) == request
    outcomes: list[tuple[str, list[Outcome]]] = [
        ("r1", [RowAnswer(0, (0.1, 0.9), 0.99, 12)]),
        ("r2", [RowFailure(-1, ErrorRecord("x", 422, "m", "p", (FieldProblem(("body", 0), "m", "t"),), 2.0))]),
    ]
    assert unpack_outcomes(pack_outcomes(outcomes)) == outcomes
