"""The three request shapes. Each one parses a body into an `Ask` and renders the answers to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sakuradite.errors import APIError, FieldProblem, ValidationError, error_from_record
from sakuradite.http.problems import Loc, dotted, invalid, problem, refuse_infinite
from sakuradite.questions import Choice, Content, Noul, NoulCriteria, Score, question_record, render
from sakuradite.records import Prose, QuestionRecord, RowAnswer, RowFailure


@dataclass(frozen=True, slots=True)
class Ask(ABC):
    """A request in any dialect: what the engine needs, and how its answers are written."""

    model: str
    state: Prose
    questions: tuple[QuestionRecord, ...]
    images: tuple[bytes, ...]
    images_field: str
    """The top-level field that the images came in."""
    stream: bool

    @abstractmethod
    def location(self, row: int) -> Loc:
        """Where the question of a row stands in the body."""

    @abstractmethod
    def answer(self, row: RowAnswer) -> dict[str, Any]:
        """One answer, ready for orjson."""

    @abstractmethod
    def result(self, model: str, rows: Sequence[RowAnswer]) -> dict[str, Any]:
        """The whole result, ready for orjson. `rows` are in the order of the questions."""

    def failure(self, failure: RowFailure) -> APIError:
        """The error of a row, with the place of its question in front."""
        error = error_from_record(failure.error)
        return error if failure.row < 0 else placed(error, self.location(failure.row))


def placed(error: APIError, loc: Loc) -> APIError:
    """The same error told where it belongs: location in front of its detail, path in `param` and in the message."""
    path = dotted(loc)
    if not error.message.startswith(f"{path}:"):
        error.message = f"{path}: {error.message}"
        error.args = (error.message,)
    error.detail = tuple(
        problem((*loc, *(p.loc[1:] if p.loc[:1] == ("body",) else p.loc)), p.msg, p.type) for p in error.detail
    ) or (FieldProblem(loc, error.message.removeprefix(f"{path}: "), error.code),)
    error.param = dotted(error.detail[0].loc)
    return error


def content(value: Content, loc: Loc) -> Prose:
    """A piece of content as the model reads it. Raises ValidationError at `loc`."""
    try:
        return (render(value),)
    except ValueError as error:
        refuse_infinite(value, loc)  # which can tell the place
        raise invalid(loc, str(error)) from None


def record(question: Noul | Choice | Score, loc: Loc) -> QuestionRecord:
    """The engine's record of a question. Raises ValidationError at the field that cannot be rendered."""
    try:
        return question_record(question)
    except ValueError as error:
        for field, value in _contents(question):
            content(value, (*loc, *field))
        raise invalid(loc, str(error)) from None


def _contents(question: Noul | Choice | Score) -> list[tuple[Loc, Content]]:
    """Every piece of content of a question with its location inside it."""
    pieces: list[tuple[Loc, Content | None]] = [(("instructions",), question.instructions)]
    match question:
        case Noul(criteria=criteria):
            sides = criteria or NoulCriteria()
            pieces += [(("criteria", "true"), sides.true), (("criteria", "false"), sides.false)]
        case Choice(criteria=options):
            pieces += [(("criteria", name), about) for name, about in options.items()]
        case Score(criteria=levels):
            pieces += [(("criteria", i), level) for i, level in enumerate(levels)]
    return [(loc, value) for loc, value in pieces if value is not None]


def too_many_questions(count: int, limit: int) -> ValidationError:
    """The error of a request with more questions than its model takes."""
    return invalid(("body", "questions"), f"Should have at most {limit} items, has {count}", "too_long")
