"""A decision request as the SDK holds it: validated once, then a body for HTTP or a record for the engine.

Problems are reported with the field paths that the server would use, before anything is sent.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticValidationError

from sakuradite.errors import FieldProblem, ValidationError
from sakuradite.http.dialects import content, record
from sakuradite.http.problems import Loc, explain, invalid, problem, refusal
from sakuradite.images import MAX_IMAGES, ImageError, illustrated, load_image, to_data_url
from sakuradite.questions import Choice, Content, Noul, NoulCriteria, Question, Questions, Score, plain, render
from sakuradite.records import QuestionRecord, RequestRecord

type State = str | Mapping[str, Any] | Sequence[Any]
"""What is decided on: text, or a JSON object, or a JSON list."""

type Image = Path | bytes | str
"""A JPEG or PNG: the path of a file, its bytes, or a base64 data URL."""

_QUESTION: TypeAdapter[Noul | Choice | Score] = TypeAdapter(Question)


@dataclass(frozen=True, slots=True)
class Decision:
    """One valid request. `images` are undecoded JPEG or PNG files; `timeout` is in seconds, None: the model's own."""

    model: str
    state: Content
    questions: dict[str, Noul | Choice | Score]
    records: tuple[QuestionRecord, ...]
    images: tuple[bytes, ...]
    timeout: float | None

    def body(self, stream: bool) -> bytes:
        """The JSON of `POST /v1/decisions`, images as data URLs."""
        fields: dict[str, Any] = {
            "model": self.model,
            "state": plain(self.state),
            "questions": {key: _wire_question(question) for key, question in self.questions.items()},
        }
        if self.images:
            fields["images"] = [to_data_url(image) for image in self.images]
        if stream:
            fields["stream"] = True
        return orjson.dumps(fields)

    def record(self) -> RequestRecord:
        """The request as the engine reads it."""
        state = illustrated(render(self.state), len(self.images))
        return RequestRecord(uuid.uuid4().hex, state, self.records, self.images, self.timeout)


def decision(
    model: str, state: State, questions: Questions, images: Sequence[Image] = (), timeout: float | None = None
) -> Decision:
    """The request of a caller's arguments. Raises ValidationError with the problems of the first part that has any."""
    checked, records = check_questions(questions)
    if timeout is not None and not timeout > 0:
        raise invalid(("body", "timeout"), "Must be above 0 seconds", "greater_than")
    return Decision(model, check_state(state), checked, records, check_images(images), timeout)


def check_state(state: State) -> Content:
    """The state as it is. Raises ValidationError when it is no text, JSON object or JSON list."""
    if not isinstance(state, str | Mapping | list | tuple):
        raise invalid(("body", "state"), "Input should be text, a JSON object or a JSON list", "content_type")
    checked = cast(Content, state)
    content(checked, ("body", "state"))
    return checked


def check_questions(questions: Questions) -> tuple[dict[str, Noul | Choice | Score], tuple[QuestionRecord, ...]]:
    """The questions as models and as records, in order. Raises ValidationError with the problems of all of them."""
    where: Loc = ("body", "questions")
    if not isinstance(questions, Mapping):
        raise invalid(where, "Input should be a JSON object", "dict_type")
    if not questions:
        raise invalid(where, "At least one question is needed", "too_short")
    checked: dict[str, Noul | Choice | Score] = {}
    records: list[QuestionRecord] = []
    problems: list[FieldProblem] = []
    for key, question in questions.items():
        if not isinstance(key, str) or not key:
            problems.append(problem((*where, str(key)), "A question id must be a non-empty text", "string_too_short"))
            continue
        try:
            checked[key] = _QUESTION.validate_python(question)
            records.append(record(checked[key], (*where, key)))
        except PydanticValidationError as error:
            problems += explain(error, question, (*where, key)).detail
        except ValidationError as error:
            problems += error.detail
    if problems:
        raise refusal(problems)
    return checked, tuple(records)


def check_images(images: Sequence[Image]) -> tuple[bytes, ...]:
    """The images as undecoded files. Raises ValidationError naming the one that is no image, or is over a limit."""
    where: Loc = ("body", "images")
    if isinstance(images, str | bytes | Path):
        raise invalid(where, "Input should be a list of images", "list_type")
    if len(images) > MAX_IMAGES:
        raise invalid(where, f"Should have at most {MAX_IMAGES} items, has {len(images)}", "too_long")
    return tuple(_image(image, (*where, index)) for index, image in enumerate(images))


def _image(image: Image, where: Loc) -> bytes:
    try:
        return load_image(image)
    except ImageError as error:
        raise invalid(where, str(error)) from None
    except OSError as error:  # of a path
        raise invalid(where, f"{error.filename}: {error.strerror}") from None


def _wire_question(question: Noul | Choice | Score) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": question.type}
    if question.instructions is not None:
        fields["instructions"] = plain(question.instructions)
    match question:
        case Noul(criteria=NoulCriteria() as sides):
            fields["criteria"] = {side: plain(about) for side, about in sides if about is not None}
        case Choice(criteria=options):
            fields["criteria"] = {name: plain(about) for name, about in options.items()}
        case Score(criteria=levels):
            fields["criteria"] = [plain(level) for level in levels]
    return fields
