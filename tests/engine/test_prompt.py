"""The words around the caller's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sakuradite.engine.prompt import WORDING, prose_text, question_text
from sakuradite.questions import Choice, Noul, Score, question_record
from sakuradite.records import QuestionRecord

TEAM = question_record(Choice(instructions="Which team?", criteria={"billing": "invoices", "shipping": None}))
MOOD = question_record(Score(instructions="How upset?", criteria=["calm", {"words": ["loud"]}]))
LATE = question_record(Noul(instructions="Was it late?"))
SIDED = question_record(Noul.model_validate({"type": "noul", "criteria": {"false": "in time"}}))


@pytest.mark.parametrize("question", [TEAM, MOOD, LATE, SIDED])
def test_every_word_of_the_caller_is_there_once(question: QuestionRecord) -> None:
    codes = ("K1", "K2")
    text = question_text(question, codes)
    words = [] if question.instructions is None else [prose_text(question.instructions)]
    words += [prose_text(c.description) for c in question.candidates if c.description is not None]
    words += [c.name for c in question.candidates if question.kind == "choice"]
    for word in words:
        assert text.count(word) == 1
    assert all(code in text for code in codes)
    assert text.startswith(WORDING.before)
    assert "None" not in text
    assert "\n\n" not in text.strip()


def test_levels_are_shown_by_their_description_alone() -> None:
    assert '{"words":["loud"]}' in question_text(MOOD, ("A", "B"))
    assert "0" not in question_text(MOOD, ("A", "B"))


def test_options_keep_their_order_and_stand_beside_their_code() -> None:
    text = question_text(TEAM, ("A", "B"))
    assert text.index("A") < text.index("billing") < text.index("shipping")
    lines = text.splitlines()
    assert [line for line in lines if "billing" in line] == [
        WORDING.option.format(code="A", text=WORDING.described.format(name="billing", about="invoices"))
    ]


def test_braces_of_the_caller_are_text() -> None:
    question = question_record(Choice(instructions="{} {code} {0!r}", criteria={"{x}": "{text}", "}{": None}))
    text = question_text(question, ("A", "B"))
    for piece in ("{} {code} {0!r}", "{x}", "{text}", "}{"):
        assert piece in text


def test_an_empty_wording_leaves_its_line_out() -> None:
    bare = replace(WORDING, options="", reply="", before="\n\n")
    assert question_text(TEAM, ("A", "B"), bare).count("\n") == 2 + 2
