"""From requests to rows: what is shared, what is refused, and what does not depend on company."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sakuradite.engine.compile import Compiler
from sakuradite.engine.fake import FakeTokenizer
from sakuradite.engine.plan import Plan, PlannedQuestion
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.questions import Choice, Noul, Score, question_record
from sakuradite.records import Candidate, QuestionRecord, RequestRecord
from tests.engine.zoo import ZOO

LATE = question_record(Noul(instructions="Was it late?"))
TEAM = question_record(Choice(instructions="Which team?", criteria={"billing": "invoices", "shipping": None}))
MOOD = question_record(Score(criteria=["calm", "annoyed", "furious"]))
MANY = question_record(Choice(criteria={f"option {i}": None for i in range(255)}))


class CountingTokenizer(FakeTokenizer):
    """Remembers how many characters of callers' text it was given."""

    def __init__(self) -> None:
        self.characters = 0
        self.calls = 0

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls += 1
        self.characters += sum(map(len, texts))
        return super().plain(texts)


def plan(compiler: Compiler, state: str, *questions: QuestionRecord) -> Plan:
    (found,) = compiler.compile([RequestRecord("", (state,), questions)])
    assert isinstance(found, Plan)
    return found


def tokens(question: PlannedQuestion) -> list[tuple[int, ...]]:
    return [question.prefix.tokens + row.suffix for row in question.rows]


def test_the_shared_part_is_tokenised_once() -> None:
    tokenizer = CountingTokenizer()
    compiler = Compiler(tokenizer, "m", 8192)
    tokenizer.characters = tokenizer.calls = 0
    found = plan(compiler, "x" * 3000, *[LATE] * 50)
    assert tokenizer.calls == 1
    assert tokenizer.characters < 3000 + 50 * 200
    assert len({id(question.prefix) for question in found.questions}) == 1
    assert found.questions[0].prefix.tokens[: len(compiler.head)] == compiler.head


def test_waiting_requests_are_tokenised_together() -> None:
    tokenizer = CountingTokenizer()
    compiler = Compiler(tokenizer, "m", 8192)
    tokenizer.calls = 0
    requests = [RequestRecord(str(i), (f"state {i}",), (LATE, TEAM)) for i in range(20)]
    together = compiler.compile(requests)
    assert tokenizer.calls == 1
    for request, found in zip(requests, together, strict=True):
        assert isinstance(found, Plan)
        alone = plan(compiler, str(request.state[0]), *request.questions)
        assert [tokens(q) for q in found.questions] == [tokens(q) for q in alone.questions]


@pytest.mark.parametrize("name", [name for name in ZOO if name != "words"])
@settings(max_examples=15, deadline=None)
@given(state=st.text(max_size=30), asked=st.text(max_size=30), others=st.lists(st.text(max_size=10), max_size=4))
def test_adding_or_reordering_questions_moves_another_answer(
    name: str, tokenizers: dict[str, FastTokenizer], state: str, asked: str, others: list[str]
) -> None:
    """Case 22: the tokens of a question, and where they are cut, are its own and the state's."""
    compiler = Compiler(tokenizers[name], name, 8192)
    question = question_record(Noul(instructions=asked))
    company = [question_record(Noul(instructions=text)) for text in others]
    alone = plan(compiler, state, question).questions[0]
    first = plan(compiler, state, question, *company).questions[0]
    last = plan(compiler, state, *company, MANY, question).questions[-1]
    for other in (first, last):
        assert other.rows == alone.rows
        assert other.prefix.tokens == alone.prefix.tokens
        assert other.input_tokens == alone.input_tokens


@pytest.mark.parametrize("name", [name for name in ZOO if name != "words"])
def test_options_sharing_a_first_token_are_scored_unfairly(name: str, tokenizers: dict[str, FastTokenizer]) -> None:
    """Case 3: codes are read, never key text; another key of the same description changes nothing that is read."""
    compiler = Compiler(tokenizers[name], name, 8192)
    about = ("a piece of plastic", "a warm garment", "a floor covering")

    def read(*keys: str) -> PlannedQuestion:
        options = tuple(Candidate(key, (text,)) for key, text in zip(keys, about, strict=True))
        return plan(compiler, "x", QuestionRecord("choice", None, options)).questions[0]

    a, b = read("card", "cardigan", "carpet"), read("drac", "nagidrac", "teprac")
    assert [read.tokens for read in a.rows[0].reads] == [read.tokens for read in b.rows[0].reads]
    assert a.labels is b.labels
    assert a.input_tokens - len(a.rows[0].suffix) == b.input_tokens - len(b.rows[0].suffix)
    assert a.rows[0].reads[0].offset == len(a.rows[0].suffix) - 1


def test_labels_of_two_tokens_share_all_but_the_last_token() -> None:
    compiler = Compiler(FakeTokenizer(), "m", 8192)
    question = plan(compiler, "a state", MANY).questions[0]
    assert len(question.rows) == len(question.labels.firsts) == 10
    (first,) = {row.suffix[0] for row in question.rows}
    assert [row.suffix for row in question.rows] == [(first, token) for token in question.labels.firsts]
    assert [len(row.reads) for row in question.rows] == [2] + [1] * 9
    assert sum(len(row.reads[-1].tokens) for row in question.rows) == 255
    assert question.input_tokens == len(question.prefix.tokens) + 1


def test_long_input_cut_silently_or_refused_without_saying_the_limit() -> None:
    """Case 21: refused with both numbers and the question's index; the questions beside it are answered."""
    compiler = Compiler(FakeTokenizer(), "m", 1000)
    room = 1000 - plan(compiler, "", LATE).questions[0].input_tokens
    assert plan(compiler, "x" * room, LATE).questions[0].input_tokens == 1000
    long = question_record(Noul(instructions="Was it late?!"))
    found = plan(compiler, "x" * room, LATE, long)
    assert [question.index for question in found.questions] == [0]
    (failure,) = found.failures
    assert failure.row == 1
    assert failure.error.code == "context_exceeded"
    assert failure.error.param == "questions.1"
    assert "question 1 needs 1001 tokens" in failure.error.message
    assert "m allows 1000" in failure.error.message


def test_megabytes_of_state_are_refused_before_they_are_tokenised() -> None:
    tokenizer = CountingTokenizer()
    compiler = Compiler(tokenizer, "m", 1000)
    tokenizer.characters = 0
    found = plan(compiler, "x" * 5_000_000, LATE, TEAM)
    assert tokenizer.characters == 8000
    assert [failure.row for failure in found.failures] == [0, 1]
    assert "about 5000000 tokens (the state alone)" in found.failures[0].error.message


def test_a_single_question_of_megabytes_is_refused_alone() -> None:
    compiler = Compiler(FakeTokenizer(), "m", 1000)
    found = plan(compiler, "x", LATE, question_record(Noul(instructions="y" * 1_000_000)), MOOD)
    assert [question.index for question in found.questions] == [0, 2]
    assert [failure.row for failure in found.failures] == [1]


def test_blanks_that_make_few_tokens_are_not_taken_for_too_long(tokenizers: dict[str, FastTokenizer]) -> None:
    """Text with many characters per token is counted, not guessed."""

    class Blanks(FakeTokenizer):
        def plain(self, texts: Sequence[str]) -> list[list[int]]:
            return [[32] * (len(text) // 100) for text in texts]

    found = plan(Compiler(Blanks(), "m", 1000), " " * 50_000, LATE)
    assert found.questions[0].input_tokens < 1000


def test_a_lone_surrogate_is_refused_without_touching_the_others() -> None:
    compiler = Compiler(FakeTokenizer(), "m", 1000)
    good = RequestRecord("", ("x",), (LATE,))
    bad, fine = compiler.compile([RequestRecord("", ("x\ud800",), (LATE,)), good])
    assert isinstance(bad, Exception)
    assert isinstance(fine, Plan)


def test_too_many_options_fail_alone(tokenizers: dict[str, FastTokenizer]) -> None:
    """Case 5 on a tokenizer that can tell few labels apart: 422 for that question, answers for the others."""
    found = plan(Compiler(tokenizers["words"], "words", 1000), "the text", LATE, MANY)
    assert [question.index for question in found.questions] == [0]
    assert [(failure.row, failure.error.status) for failure in found.failures] == [(1, 422)]
