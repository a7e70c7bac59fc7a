"""Questions as a user writes them: `Noul`, `Choice`, `Score`, and how their content becomes text.

Pydantic models, shared by the SDK and the native HTTP route. What the engine reads is in `records`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, FailFast, Field

from sakuradite.records import Candidate, Prose, QuestionRecord

type Content = str | dict[str, Any] | list[Any]
"""What a state, an instruction or a criterion may be: text, or a JSON object, or a JSON list."""

MAX_OPTIONS = 255  # candidates of one question: what two-token labels can code with every tokenizer
MAX_DEPTH = 100  # levels of nesting in JSON content; deeper input is refused rather than recursed into
NEUTRAL_INSTRUCTIONS = "Is this true of the text?"  # a noul with neither instructions nor criteria


class _Question(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    instructions: Content | None = None
    """What to decide, as text, a JSON object or a JSON list. Optional on every type."""


class NoulCriteria(BaseModel):
    """What counts as true and what counts as false. Either side may be left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    true: Content | None = None
    false: Content | None = None


class Noul(_Question):
    """Is a statement true? Answered with the probability that it is.

    >>> Noul(instructions="The customer asks for a refund.")
    """

    type: Literal["noul"] = "noul"
    criteria: NoulCriteria | None = None


class Choice(_Question):
    """Which of the named options fits? Answered with one key, a probability per key and a confidence.

    `criteria` maps each option's name to a description, or to None where the name says enough; 1 to 255 options.

    >>> Choice(instructions="Which team?", criteria={"billing": "invoices, charges", "shipping": None})
    """

    type: Literal["choice"] = "choice"
    criteria: Annotated[dict[str, Content | None], FailFast()] = Field(min_length=1, max_length=MAX_OPTIONS)


class Score(_Question):
    """Where on an ordered list? Answered with the expected position from 0, a confidence, a probability per level.

    `criteria` lists the levels from the lowest to the highest; 1 to 255 levels.

    >>> Score(instructions="How urgent?", criteria=["can wait", "this week", "today"])
    """

    type: Literal["score"] = "score"
    criteria: Annotated[list[Content], FailFast()] = Field(min_length=1, max_length=MAX_OPTIONS)


type Question = Annotated[Noul | Choice | Score, Field(discriminator="type")]
"""Any of the three question types, told apart by `type`."""

type Questions = Mapping[str, Noul | Choice | Score | Mapping[str, Any]]
"""Questions by id. An id is any non-empty string; it comes back byte for byte and the model never sees it."""


def render(content: Content) -> str:
    """The text the model reads for a piece of content: text as it is, JSON compactly in the caller's key order.

    Integers of any size keep every digit. Raises ValueError for what JSON cannot hold (a number that is not finite,
    a key that is not text, a lone surrogate, over `MAX_DEPTH` levels); the message has no content in it.
    """
    if isinstance(content, str):
        return checked_text(content)
    try:
        return orjson.dumps(plain(content)).decode()
    except orjson.JSONEncodeError as error:
        raise ValueError("not JSON: text with a lone surrogate, or a value of another type") from error


def plain(value: Any) -> Any:
    """The value as orjson can write it, integers of any size included. Raises ValueError as `render` promises."""
    return _plain(value, 1)


def checked_text(text: str) -> str:
    """The same text, or ValueError where it holds a lone surrogate, which no encoding can carry."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text holds a lone surrogate at character {error.start}") from None
    return text


def _plain(value: Any, depth: int) -> Any:
    """The value with long integers as literal digits, checked as `render` promises."""
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else orjson.Fragment(str(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("numbers must be finite")
        return value
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("the keys of a JSON object must be text")
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise ValueError(f"{type(value).__name__} is not a JSON value")


def question_record(question: Noul | Choice | Score) -> QuestionRecord:
    """The question as the engine reads it: rendered text, candidates in order (a noul's are true, then false)."""

    def text(content: Content | None) -> Prose | None:
        return None if content is None else (render(content),)

    instructions = text(question.instructions)
    candidates: tuple[Candidate, ...]
    match question:
        case Noul(criteria=criteria):
            sides = criteria or NoulCriteria()
            if instructions is None and sides.true is None and sides.false is None:
                instructions = (NEUTRAL_INSTRUCTIONS,)
            candidates = (Candidate("true", text(sides.true)), Candidate("false", text(sides.false)))
        case Choice(criteria=options):
            candidates = tuple(Candidate(checked_text(name), text(about)) for name, about in options.items())
        case Score(criteria=levels):
            candidates = tuple(Candidate(str(i), text(level)) for i, level in enumerate(levels))
    return QuestionRecord(question.type, instructions, candidates)
