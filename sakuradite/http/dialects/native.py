"""The native dialect: `{model, state, questions: {id: question}, images?, stream?}`, and how its answers are written.

System One shares the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from pydantic import ValidationError as PydanticValidationError

from sakuradite.answers import choice_confidence, expected_score, score_confidence
from sakuradite.http.dialects import Ask, content, record
from sakuradite.http.problems import Loc, explain, invalid
from sakuradite.images import MAX_IMAGES, ImageError, from_data_url, illustrated
from sakuradite.questions import Choice, Content, Noul, Question, Score, render
from sakuradite.records import RowAnswer

type QuestionId = Annotated[str, Field(min_length=1)]


class DecisionRequest(BaseModel):
    """Typed questions about a state. Every question is answered on its own, from the same state."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str = Field(min_length=1, description="The id of a resident model, or an alias.")
    state: Content = Field(description="What the questions are about: text, a JSON object or a JSON list.")
    questions: dict[QuestionId, Question] = Field(
        min_length=1,
        description="Questions by id. An id is any non-empty string; it comes back unchanged, the model never sees it.",
    )
    images: list[str] = Field(
        default=[],
        max_length=MAX_IMAGES,
        description="Up to eight base64 data URLs of JPEG or PNG images, shown to the model before the state. "
        "At most 20 MiB and 50 megapixels each.",
    )
    stream: bool = Field(default=False, description="Send each answer as a server-sent event when it is ready.")


@dataclass(frozen=True, slots=True)
class KeyedAsk(Ask):
    """A request whose questions have ids."""

    asked: Mapping[str, Noul | Choice | Score]
    ids: tuple[str, ...]

    def location(self, row: int) -> Loc:
        return ("body", "questions", self.ids[row])

    def answer(self, row: RowAnswer) -> dict[str, Any]:
        question, p = self.asked[self.ids[row.row]], row.probabilities
        match question:
            case Noul():
                return {"type": "noul", "noul": p[0], "x_label_mass": row.label_mass}
            case Choice(criteria=options):
                names = list(options)
                return {
                    "type": "choice",
                    "choice": names[p.index(max(p))],
                    "confidence": choice_confidence(p),
                    "probabilities": dict(zip(names, p, strict=True)),
                    "x_label_mass": row.label_mass,
                }
            case Score(criteria=levels):
                keys = [str(i) for i in range(len(levels))]
                legend = [x if isinstance(x, str) else orjson.Fragment(render(x)) for x in levels]
                return {
                    "type": "score",
                    "score": expected_score(p),
                    "confidence": score_confidence(p),
                    "legend": dict(zip(keys, legend, strict=True)),
                    "probabilities": dict(zip(keys, p, strict=True)),
                    "x_label_mass": row.label_mass,
                }

    def result(self, model: str, rows: Sequence[RowAnswer]) -> dict[str, Any]:
        answers = {self.ids[row.row]: self.answer(row) for row in rows}
        return {"model": model, "answers": answers, "usage": usage(rows)}


def usage(rows: Sequence[RowAnswer]) -> dict[str, int]:
    """The sum over the questions of their full prompts; nothing is ever generated."""
    return {"input_tokens": sum(row.input_tokens for row in rows), "output_tokens": 0}


def parse(data: Any) -> Ask:
    """The request of a JSON body. Raises ValidationError with the location of every problem."""
    try:
        request = DecisionRequest.model_validate(data)
    except PydanticValidationError as error:
        raise explain(error, data) from None
    images = tuple(_image(url, ("body", "images", i)) for i, url in enumerate(request.images))
    state = content(request.state, ("body", "state"))
    if images:
        state = illustrated(str(state[0]), len(images))
    questions = request.questions
    return KeyedAsk(
        model=request.model,
        state=state,
        questions=tuple(record(q, ("body", "questions", id_)) for id_, q in questions.items()),
        images=images,
        images_field="images",
        stream=request.stream,
        asked=questions,
        ids=tuple(questions),
    )


def _image(url: str, loc: Loc) -> bytes:
    try:
        return from_data_url(url)
    except ImageError as error:
        raise invalid(loc, str(error), "image_invalid") from None
