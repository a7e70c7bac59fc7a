"""Requests of chosen sizes, and what they are in tokens."""

from __future__ import annotations

from sakuradite.engine.backend import Group, Prefix, Row
from sakuradite.engine.compile import Compiler
from sakuradite.errors import APIError
from sakuradite.questions import Choice, Noul, question_record
from sakuradite.records import QuestionRecord, RequestRecord

SENTENCES = (
    "The customer wrote on Monday that the parcel had not arrived.",
    "Support replied that the courier reported a delay at the depot.",
    "On Tuesday the customer asked for a refund and mentioned a broken seal.",
    "The agent offered a replacement or a voucher worth ten percent.",
    "The order contained two lamps, one desk and a set of four chairs.",
    "Payment was made by card and the bank confirmed the charge.",
)
SUBJECTS = ("refund", "delay", "replacement", "payment", "desk", "lamp", "chair", "courier", "bank", "voucher", "seal")
TOKENS_PER_SENTENCE = 16  # numbered, as the tokenizers here split them


def state(tokens: int, seed: int = 0) -> str:
    """A conversation of about so many tokens."""
    count = max(1, tokens // TOKENS_PER_SENTENCE)
    return " ".join(f"[{seed + i}] {SENTENCES[(seed + i) % len(SENTENCES)]}" for i in range(count))


def question(number: int) -> QuestionRecord:
    """A choice of three whose prompt, with the options, has about 60 tokens."""
    subject = SUBJECTS[number % len(SUBJECTS)]
    ask = "Is the customer unhappy about" if number % 2 else "Which part of the conversation deals with"
    criteria = {
        "clear": f"yes, clearly, the {subject} is a problem",
        "fine": f"no, the {subject} is fine",
        "unsaid": "the text does not say",
    }
    return question_record(Choice(instructions=f"{ask} the {subject}?", criteria=criteria))


def request(name: str, state_tokens: int, questions: int, seed: int = 0) -> RequestRecord:
    """A request of so many questions on one state."""
    asked = tuple(question(seed + i) for i in range(questions))
    return RequestRecord(name, (state(state_tokens, seed),), asked, timeout=3600.0)


def short_request() -> RequestRecord:
    """One yes/no question on a state of 60 tokens."""
    return RequestRecord("one", (state(60),), (question_record(Noul(instructions="Is it urgent?")),), timeout=3600.0)


def compiled(compiler: Compiler, asked: RequestRecord) -> Group:
    """The request as the rows that the backend gets."""
    (plan,) = compiler.compile([asked])
    assert not isinstance(plan, APIError), plan
    assert not plan.failures, plan.failures
    prefixes = {id(q.prefix): q.prefix for q in plan.questions}
    assert len(prefixes) == 1
    return Group(next(iter(prefixes.values())), [row for q in plan.questions for row in q.rows])


def full_rows(group: Group) -> list[tuple[int, ...]]:
    """Complete prompts, as a plain loop forwards them."""
    return [(*group.prefix.tokens, *row.suffix) for row in group.rows]


def fresh(group: Group) -> Group:
    """The same request again, nothing of it computed."""
    return Group(Prefix(group.prefix.tokens), list[Row](group.rows))
