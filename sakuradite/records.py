"""The plain records that move between processes: a request going down, outcomes coming back.

Frozen dataclasses and their bytes (orjson), importing nothing of the package but `errors`. No HTTP, no Ray, no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson

from sakuradite.errors import ErrorRecord, FieldProblem

type Kind = Literal["noul", "choice", "score"]

type Prose = tuple[str | int, ...]
"""Text with images in it: strings as they are, integers index the request's `images`. Text alone is `("…",)`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One possible answer. `name` is what the caller called it ("0", "1", … for a score's levels)."""

    name: str
    description: Prose | None = None


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """One question, rendered. A noul has two candidates, true then false."""

    kind: Kind
    instructions: Prose | None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request for one model. `timeout` is what is left of the deadline in seconds, None for the model's own.

    `images` are undecoded JPEG or PNG files. Question ids stay with the caller: rows are known by their index. `id` is
    the caller's or the router's, with something unique behind a slash where the caller chose it; `trace` is the span
    that the work belongs to, as a W3C `traceparent`.
    """

    id: str
    state: Prose
    questions: tuple[QuestionRecord, ...]
    images: tuple[bytes, ...] = ()
    timeout: float | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """A scored row: normalised probabilities in candidate order, the mass that all labels had before that, tokens read.

    `row` is the question's index in its request; `input_tokens` counts the full prompt of this question.
    """

    row: int
    probabilities: tuple[float, ...]
    label_mass: float
    input_tokens: int


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that could not be answered. Row -1 stands for the whole request."""

    row: int
    error: ErrorRecord


type Outcome = RowAnswer | RowFailure

type Packet = tuple[bytes, tuple[bytes, ...]]
"""A request on its way: its JSON, and its images as they are (base64 would cost a third more and a copy)."""


def pack_request(request: RequestRecord) -> Packet:
    """The request as bytes for another process."""
    questions = [[q.kind, q.instructions, [[c.name, c.description] for c in q.candidates]] for q in request.questions]
    return orjson.dumps([request.id, request.state, questions, request.timeout, request.trace]), request.images


def unpack_request(packet: Packet) -> RequestRecord:
    """The request of `pack_request`."""
    body, images = packet
    id_, state, questions, timeout, trace = orjson.loads(body)
    return RequestRecord(
        id_,
        tuple(state),
        tuple(
            QuestionRecord(kind, _prose(about), tuple(Candidate(name, _prose(text)) for name, text in candidates))
            for kind, about, candidates in questions
        ),
        images,
        timeout,
        trace,
    )


def _prose(parts: list[str | int] | None) -> Prose | None:
    return None if parts is None else tuple(parts)


def pack_outcomes(group: list[tuple[str, list[Outcome]]]) -> bytes:
    """Outcomes of one or several requests, by request id, as bytes for another process."""
    return orjson.dumps([[id_, [_outcome_list(o) for o in outcomes]] for id_, outcomes in group])


def unpack_outcomes(data: bytes) -> list[tuple[str, list[Outcome]]]:
    """The outcomes of `pack_outcomes`."""
    return [(id_, [_outcome(fields) for fields in outcomes]) for id_, outcomes in orjson.loads(data)]


def _outcome_list(outcome: Outcome) -> list[Any]:
    match outcome:
        case RowAnswer(row, probabilities, mass, tokens):
            return [row, probabilities, mass, tokens]
        case RowFailure(row, e):
            detail = [[p.loc, p.msg, p.type] for p in e.detail]
            return [row, e.code, e.status, e.message, e.param, detail, e.retry_after]


def _outcome(fields: list[Any]) -> Outcome:
    if len(fields) == 4:
        row, probabilities, mass, tokens = fields
        return RowAnswer(row, tuple(probabilities), mass, tokens)
    row, code, status, message, param, detail, retry_after = fields
    problems = tuple(FieldProblem(tuple(loc), msg, type_) for loc, msg, type_ in detail)
    return RowFailure(row, ErrorRecord(code, status, message, param, problems, retry_after))
