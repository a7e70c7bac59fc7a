"""The words around the caller's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sakuradite.engine.fake import FakeTokenizer
from sakuradite.engine.labels import LabelBook
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


WAYS = {
    "words": replace(WORDING, noul_names=None, noul_turned=False),
    "words turned": replace(WORDING, noul_names=None, noul_turned=True),
    "options": replace(WORDING, noul_names=("correct", "incorrect"), noul_turned=False),
    "options turned": replace(WORDING, noul_names=("correct", "incorrect"), noul_turned=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_noul_in_every_way_it_can_be_asked(way: str) -> None:
    """Whatever is named first, the code of each side stands beside that side's words."""
    wording = WAYS[way]
    labels = LabelBook(FakeTokenizer(), "m", replace(wording, noul_words=(("T", "F"),))).labels("noul", 2)
    both = Noul.model_validate({"type": "noul", "criteria": {"true": "it was late", "false": "it was in time"}})
    text = question_text(question_record(both), labels.codes, wording)
    if wording.noul_names is None:
        assert labels.codes == ("T", "F")
        sides = (("T", "it was late"), ("F", "it was in time"))
        lines = [wording.meaning.format(code=code, text=text) for code, text in sides]
    else:
        assert labels.codes == (("B", "A") if wording.noul_turned else ("A", "B"))
        named = ("correct: it was late", "incorrect: it was in time")
        lines = [wording.option.format(code=c, text=t) for c, t in zip(labels.codes, named, strict=True)]
    assert all(line in text for line in lines)
    assert (text.index("it was late") > text.index("it was in time")) == wording.noul_turned


def test_digits_for_the_levels_of_a_score() -> None:
    book = LabelBook(FakeTokenizer(), "m", replace(WORDING, score_codes="0123456789"))
    assert book.labels("score", 10).codes == tuple("0123456789")
    assert len(book.labels("score", 11).codes) == 11


def test_an_empty_wording_leaves_its_line_out() -> None:
    bare = replace(WORDING, options="", reply="", before="\n\n")
    assert question_text(TEAM, ("A", "B"), bare).count("\n") == 2 + 2
