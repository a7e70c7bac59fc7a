"""The System One dialect: the same questions within its own limits, and images as assets named in the text.

Unknown top-level fields are ignored, aliases are common (`jev-latest`), and it never streams.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic import ValidationError as PydanticValidationError

from sakuradite.errors import InvalidRequestError
from sakuradite.http.body import Part, read_parts
from sakuradite.http.dialects import Ask, content, record
from sakuradite.http.dialects.native import KeyedAsk, QuestionId
from sakuradite.http.problems import dotted, explain, invalid, refuse_infinite
from sakuradite.http.reading import read_json
from sakuradite.images import MAX_IMAGES, ImageError, check_image, from_base64
from sakuradite.questions import Choice, Content, Noul, NoulCriteria, Score
from sakuradite.records import Candidate, Prose, QuestionRecord

MAX_LEVELS = 10  # of a score here; the native route takes 255


class SystemOneNoul(Noul):
    """Is it true? Needs instructions, or a criterion on one side at least."""

    @model_validator(mode="after")
    def _asks_something(self) -> SystemOneNoul:
        sides = self.criteria or NoulCriteria()
        if self.instructions is None and sides.true is None and sides.false is None:
            raise ValueError("A noul needs instructions or criteria")
        return self


class SystemOneScore(Score):
    """Where on a list of up to 10 levels?"""

    criteria: list[Content] = Field(min_length=1, max_length=MAX_LEVELS)


type SystemOneQuestion = Annotated[SystemOneNoul | Choice | SystemOneScore, Field(discriminator="type")]


class Asset(BaseModel):
    """An image: inline as base64, or as the part of a multipart form that `part` names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["image"] = "image"
    format: Literal["png", "jpg", "jpeg"] | None = Field(
        default=None, description="Needed with data_base64. The bytes themselves decide."
    )
    data_base64: str | None = Field(default=None, description="The file, base64. Ignored beside `part`.")
    part: str | None = Field(default=None, description="The name of the form part with the file.")

    @model_validator(mode="after")
    def _has_data(self) -> Asset:
        if self.part is None and self.data_base64 is None:
            raise ValueError("An asset needs data_base64 with format, or part")
        if self.part is None and self.format is None:
            raise ValueError("An asset with data_base64 needs format")
        return self


class SystemOneRequest(BaseModel):
    """Questions about a state, for clients of TypeSafe System One."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = Field(min_length=1, description="The id of a resident model, or an alias such as jev-latest.")
    state: Content = Field(description="What the questions are about: text, a JSON object or a JSON list.")
    questions: dict[QuestionId, SystemOneQuestion] = Field(min_length=1, description="Questions by id.")
    assets: dict[Annotated[str, Field(min_length=1)], Asset] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_IMAGES,
        description="Images by placeholder; each is shown where its placeholder stands in a string of the state, "
        "the instructions or the criteria.",
    )


def parse(body: bytes, content_type: str) -> Ask:
    """The request of a JSON body or of a multipart form. Raises ValidationError or InvalidRequestError."""
    parts: list[Part] = []
    if content_type.lower().startswith("multipart/"):
        first, *parts = read_parts(body, content_type)
        if first.name != "request":
            raise invalid(("body",), "The first part of the form must be named request", "multipart_invalid")
        body = first.content
    data = read_json(body)
    try:
        request = SystemOneRequest.model_validate(data)
    except PydanticValidationError as error:
        raise explain(error, data) from None
    for key in data.keys() - SystemOneRequest.model_fields.keys():  # ignored, but still JSON
        refuse_infinite(data[key], ("body", key))
    names = tuple(request.assets or ())
    images = _images(request.assets or {}, parts)
    shown = Placeholders(names)
    state = shown.prose(content(shown.mark(request.state), ("body", "state")))
    questions = tuple(
        shown.question(record(shown.marked(q), ("body", "questions", id_))) for id_, q in request.questions.items()
    )
    if unused := [name for i, name in enumerate(names) if i not in shown.used]:
        raise _misuse(
            ("body", "assets", unused[0]), "Its placeholder stands nowhere in state, instructions or criteria"
        )
    return KeyedAsk(
        model=request.model,
        state=state,
        questions=questions,
        images=images,
        images_field="assets",
        stream=False,
        asked=request.questions,
        ids=tuple(request.questions),
    )


def _images(assets: Mapping[str, Asset], parts: Sequence[Part]) -> tuple[bytes, ...]:
    waiting = {part.name: part.content for part in parts}
    if len(waiting) < len(parts):
        raise _misuse(("body",), "Two parts of the form have the same name")
    images = []
    for name, asset in assets.items():
        loc = ("body", "assets", name)
        if asset.part is not None and asset.part not in waiting:
            raise _misuse((*loc, "part"), "No part of the form has this name, or another asset has claimed it")
        try:
            if asset.part is not None:
                images.append(waiting.pop(asset.part))
                check_image(images[-1])
            else:
                images.append(from_base64(asset.data_base64 or ""))
        except ImageError as error:
            raise invalid(loc, str(error), "image_invalid") from None
    if waiting:
        raise _misuse(("body",), f"{len(waiting)} part(s) of the form are claimed by no asset")
    return tuple(images)


def _misuse(loc: tuple[str, ...], message: str) -> InvalidRequestError:
    path = dotted(loc)
    return InvalidRequestError(f"{path}: {message}" if path else message, param=path or None)


class Placeholders:
    """Finds the placeholders of assets in content, and remembers which were used.

    Content is marked before it is rendered and split after, because rendering escapes the strings of JSON content. The
    marker holds a random number, so no text of the caller's can be taken for one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.numbers = sorted(((name, i) for i, name in enumerate(names)), key=lambda n: len(n[0]), reverse=True)
        self.used: set[int] = set()
        self.nonce = secrets.token_hex(8)
        self.marker = re.compile(rf"<{self.nonce}:(\d)>")

    def mark(self, value: Any) -> Any:
        """The same content with markers in its strings; keys stay as they are."""
        if not self.numbers:
            return value
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        """Longer placeholders first. Split, not searched by a pattern: its time must not depend on what is in there."""
        pieces = [text]  # every second one is a marker
        for name, i in self.numbers:
            cut: list[str] = []
            for at, piece in enumerate(pieces):
                if at % 2:
                    cut.append(piece)
                    continue
                for j, part in enumerate(piece.split(name)):
                    cut += [f"<{self.nonce}:{i}>", part] if j else [part]
            pieces = cut
        return "".join(pieces)

    def marked(self, question: Noul | Choice | Score) -> Noul | Choice | Score:
        """The same question with markers in its instructions and criteria."""
        if not self.numbers:
            return question
        match question:
            case Noul(criteria=sides):
                criteria: Any = sides and sides.model_copy(
                    update={"true": self.mark(sides.true), "false": self.mark(sides.false)}
                )
            case _:
                criteria = self.mark(question.criteria)
        return question.model_copy(update={"instructions": self.mark(question.instructions), "criteria": criteria})

    def prose(self, text: Prose) -> Prose:
        """Rendered text with images in the place of markers."""
        if not self.numbers:
            return text
        pieces: list[str | int] = []
        for part in text:
            for i, piece in enumerate(self.marker.split(str(part))):
                if i % 2:
                    self.used.add(int(piece))
                    pieces.append(int(piece))
                elif piece:
                    pieces.append(piece)
        return tuple(pieces)

    def question(self, question: QuestionRecord) -> QuestionRecord:
        """A question's record with images in the place of markers."""
        if not self.numbers:
            return question
        return QuestionRecord(
            question.kind,
            question.instructions and self.prose(question.instructions),
            tuple(Candidate(c.name, c.description and self.prose(c.description)) for c in question.candidates),
        )
