"""The OpenAI Decisions dialect: `{model, input, questions: [question]}`; a question is known by its place.

Long because the dialect has many kinds of input items, each a model of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic import ValidationError as PydanticValidationError

from sakuradite.answers import choice_confidence, expected_score, score_confidence
from sakuradite.errors import InvalidRequestError
from sakuradite.http.dialects import Ask, content
from sakuradite.http.problems import Loc, dotted, explain, invalid
from sakuradite.images import DATA_URL, MAX_IMAGES, ImageError, from_data_url
from sakuradite.questions import MAX_OPTIONS
from sakuradite.records import Candidate, Prose, QuestionRecord, RowAnswer

MAX_QUESTIONS = 400


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CacheBreakpoint(_Wire):
    """Accepted and ignored: prefixes are shared by themselves."""

    mode: Literal["explicit"]


class InputText(_Wire):
    """Text."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputImage(_Wire):
    """An image as a base64 data URL. Remote URLs are refused, `detail` is ignored."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["low", "high", "auto", "original"] | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputJSON(_Wire):
    """A JSON object, or a list of objects, shown as compact JSON."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


class OutputText(_Wire):
    """What an assistant said."""

    type: Literal["output_text"]
    text: str


class Refusal(_Wire):
    """What an assistant said when it declined."""

    type: Literal["refusal"]
    refusal: str


type InputPart = Annotated[InputText | InputImage | InputJSON, Field(discriminator="type")]
type TextOrImage = Annotated[InputText | InputImage, Field(discriminator="type")]
type AssistantPart = Annotated[OutputText | Refusal, Field(discriminator="type")]

type InputParts = Annotated[list[InputPart], FailFast()]
type TextParts = Annotated[list[InputText], FailFast()]
type OutputParts = Annotated[list[TextOrImage], FailFast()]
type AssistantParts = Annotated[list[AssistantPart], FailFast()]


class UserMessage(_Wire):
    """A message of the user."""

    type: Literal["message"] = "message"
    role: Literal["user"]
    content: str | InputParts


class InstructionMessage(_Wire):
    """A message of the developer or the system."""

    type: Literal["message"] = "message"
    role: Literal["developer", "system"]
    content: str | TextParts


class AssistantMessage(_Wire):
    """An earlier message of an assistant."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: str | AssistantParts
    phase: Literal["commentary", "final_answer"] | None = None


type ItemStatus = Literal["in_progress", "completed", "incomplete"]


class FunctionCall(_Wire):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    namespace: str | None = None
    status: ItemStatus | None = None


class FunctionCallOutput(_Wire):
    """What a function returned; `call_id` is that of an earlier call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | OutputParts
    id: str | None = None
    status: ItemStatus | None = None


class CustomToolCall(_Wire):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    namespace: str | None = None
    status: ItemStatus | None = None


class CustomToolCallOutput(_Wire):
    """What a custom tool returned; `call_id` is that of an earlier call."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: str | OutputParts
    id: str | None = None
    status: ItemStatus | None = None


ROLES = {"user": "user", "developer": "instruction", "system": "instruction", "assistant": "assistant"}
CALLS = {"function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}


def _item_kind(value: Any) -> str | None:
    """Which item a JSON object is: its `type`, or for a message (whose type may be left out) its role."""
    if not isinstance(value, dict):
        return "user"  # which then says that an object is expected
    kind = value.get("type", "message")
    if kind == "message":
        role = value.get("role")
        return ROLES.get(role) if isinstance(role, str) else None
    return kind if isinstance(kind, str) and kind in CALLS else None


type InputItem = Annotated[
    Annotated[UserMessage, Tag("user")]
    | Annotated[InstructionMessage, Tag("instruction")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutput, Tag("custom_tool_call_output")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message="Should be a message of user, developer, system or assistant, "
        "or one of function_call, function_call_output, custom_tool_call, custom_tool_call_output",
    ),
]


type InputItems = Annotated[list[InputItem], FailFast()]


class Predicate(_Wire):
    """How likely is it that a statement about the input is true?"""

    type: Literal["predicate"]
    instructions: str | InputParts
    name: str | None = None


class ChoiceOption(_Wire):
    """An option. Values are typed: the text "true" is not the boolean true."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceQuestion(_Wire):
    """Which option fits?"""

    type: Literal["choice"]
    instructions: str | InputParts
    choices: Annotated[list[ChoiceOption], FailFast()] = Field(min_length=1, max_length=MAX_OPTIONS)
    name: str | None = None

    @model_validator(mode="after")
    def _unique(self) -> ChoiceQuestion:
        if len({(type(c.value), c.value) for c in self.choices}) < len(self.choices):
            raise ValueError("The values of choices must be unique")
        return self


class Level(_Wire):
    """A level of a score."""

    label: str
    description: str | None = None


class ScoreQuestion(_Wire):
    """Where on the ordered levels?"""

    type: Literal["score"]
    instructions: str | InputParts
    levels: Annotated[list[Level], FailFast()] = Field(min_length=1, max_length=MAX_OPTIONS)
    name: str | None = None


type DecisionQuestion = Annotated[Predicate | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class CacheOptions(_Wire):
    """Accepted and ignored."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class OpenAIDecisionRequest(_Wire):
    """Questions about an input, for the Decisions API of the `openai` client."""

    model: str = Field(min_length=1, description="The id of a resident model, or an alias.")
    input: str | InputItems = Field(description="Text, or messages and tool calls in order.")
    questions: list[DecisionQuestion] = Field(
        min_length=1, max_length=MAX_QUESTIONS, description="Answers come back in this order."
    )
    prompt_cache_key: str | None = Field(default=None, description="Accepted and ignored.")
    prompt_cache_options: CacheOptions | None = Field(default=None, description="Accepted and ignored.")
    safety_identifier: str | None = Field(default=None, description="Accepted and ignored.")
    stream: Annotated[StrictBool, WithJsonSchema({"const": False})] | None = Field(
        default=None, description="This dialect does not stream."
    )


@dataclass(frozen=True, slots=True)
class OrderedAsk(Ask):
    """A request whose questions are known by their order."""

    asked: Sequence[Predicate | ChoiceQuestion | ScoreQuestion]

    def location(self, row: int) -> Loc:
        return ("body", "questions", row)

    def answer(self, row: RowAnswer) -> dict[str, Any]:
        question, p = self.asked[row.row], row.probabilities
        head = {"type": question.type, "name": question.name}
        match question:
            case Predicate():
                return {**head, "probability": p[0]}
            case ChoiceQuestion(choices=options):
                return {
                    **head,
                    "choice": options[p.index(max(p))].value,
                    "confidence": choice_confidence(p),
                    "probabilities": [{"value": o.value, "probability": x} for o, x in zip(options, p, strict=True)],
                }
            case ScoreQuestion(levels=levels):
                return {
                    **head,
                    "score": expected_score(p),
                    "confidence": score_confidence(p),
                    "probabilities": [
                        {"value": i, "label": level.label, "probability": x}
                        for i, (level, x) in enumerate(zip(levels, p, strict=True))
                    ],
                }

    def result(self, model: str, rows: Sequence[RowAnswer]) -> dict[str, Any]:
        tokens = sum(row.input_tokens for row in rows)
        return {
            "model": model,
            "answers": [self.answer(row) for row in rows],
            "usage": {
                "input_tokens": tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens,
            },
        }


def is_openai(data: Any) -> bool:
    """Whether a body of `/v1/decisions` has this dialect's shape."""
    return isinstance(data, dict) and "input" in data and isinstance(data.get("questions"), list)


def parse(data: Any) -> Ask:
    """The request of a JSON body.

    Raises ValidationError, and InvalidRequestError (400) for what this dialect has and this server does not: unknown
    fields, streaming, remote images; and for a tool output without its call.
    """
    if data.get("stream") is True:
        raise InvalidRequestError("stream: this dialect does not stream; leave stream out", param="stream")
    try:
        request = OpenAIDecisionRequest.model_validate(data)
    except PydanticValidationError as error:
        refused = explain(error, data)
        if all(p.type == "extra_forbidden" for p in refused.detail):
            raise InvalidRequestError(refused.message, param=refused.param) from None
        raise refused from None
    gallery = Gallery()
    return OrderedAsk(
        model=request.model,
        state=_state(request.input, gallery),
        questions=tuple(_record(q, ("body", "questions", i), gallery) for i, q in enumerate(request.questions)),
        images=tuple(gallery.images),
        images_field="input",
        stream=False,
        asked=request.questions,
    )


class Gallery:
    """The images of a request in the order of their parts."""

    def __init__(self) -> None:
        self.images: list[bytes] = []

    def add(self, url: str, loc: Loc) -> int:
        """The number of a new image. Raises ValidationError, or InvalidRequestError for a remote URL."""
        if DATA_URL.match(url, 0, 256) is None:
            path = dotted(loc)
            raise InvalidRequestError(f"{path}: only base64 data URLs are taken; nothing is fetched", param=path)
        if len(self.images) == MAX_IMAGES:
            raise invalid(loc, f"A request has at most {MAX_IMAGES} images", "too_long")
        try:
            self.images.append(from_data_url(url))
        except ImageError as error:
            raise invalid(loc, str(error), "image_invalid") from None
        return len(self.images) - 1


type Part = InputText | InputImage | InputJSON | OutputText | Refusal


def _prose(parts: str | Sequence[Part], loc: Loc, gallery: Gallery) -> Prose:
    """Text and parts as the model reads them, a line break between two pieces of text."""
    if isinstance(parts, str):
        return (parts,)
    pieces: list[str | int] = []
    for i, part in enumerate(parts):
        match part:
            case InputImage(image_url=url):
                pieces.append(gallery.add(url, (*loc, i, "image_url")))
            case InputJSON(data=data):
                pieces += content(data, (*loc, i, "data"))
            case Refusal(refusal=text):
                pieces.append(text)
            case InputText(text=text) | OutputText(text=text):
                pieces.append(text)
    return _joined([(piece,) for piece in pieces], "\n")


def _joined(pieces: Sequence[Prose], gap: str) -> Prose:
    """Pieces one after the other, a gap between two of them, neighbouring text made one."""
    out: list[str | int] = []
    for i, piece in enumerate(pieces):
        for part in (gap, *piece) if i else piece:
            if isinstance(part, str) and out and isinstance(out[-1], str):
                out[-1] += part
            else:
                out.append(part)
    return tuple(out)


def _state(given: str | Sequence[Any], gallery: Gallery) -> Prose:
    """The input as one text: a lone user message as it is, a conversation with the speaker before each turn."""
    if isinstance(given, str):
        return (given,)
    if len(given) == 1 and isinstance(given[0], UserMessage):
        return _prose(given[0].content, ("body", "input", 0, "content"), gallery)
    turns: list[Prose] = []
    calls: set[tuple[str, str]] = set()
    for i, item in enumerate(given):
        loc: Loc = ("body", "input", i)
        match item:
            case (
                FunctionCall(call_id=id_, name=name, arguments=text)
                | CustomToolCall(call_id=id_, name=name, input=text)
            ):
                calls.add((item.type, id_))
                turns.append((f"call {name} ({id_}): {text}",))
            case FunctionCallOutput(call_id=id_, output=parts) | CustomToolCallOutput(call_id=id_, output=parts):
                if (item.type.removesuffix("_output"), id_) not in calls:
                    path = dotted((*loc, "call_id"))
                    raise InvalidRequestError(f"{path}: no earlier call has this id", param=path)
                turns.append(_turn(f"result ({id_})", _prose(parts, (*loc, "output"), gallery)))
            case _:
                turns.append(_turn(item.role, _prose(item.content, (*loc, "content"), gallery)))
    return _joined(turns, "\n\n")


def _turn(speaker: str, said: Prose) -> Prose:
    return _joined([(f"{speaker}: ",), said], "")


def _record(question: Predicate | ChoiceQuestion | ScoreQuestion, loc: Loc, gallery: Gallery) -> QuestionRecord:
    instructions = _prose(question.instructions, (*loc, "instructions"), gallery)
    match question:
        case Predicate():
            return QuestionRecord("noul", instructions, (Candidate("true"), Candidate("false")))
        case ChoiceQuestion(choices=options):
            texts = {o.value for o in options if isinstance(o.value, str)}
            return QuestionRecord(
                "choice",
                instructions,
                tuple(Candidate(_name(o.value, texts), (o.description,) if o.description else None) for o in options),
            )
        case ScoreQuestion(levels=levels):
            return QuestionRecord(
                "score", instructions, tuple(Candidate(str(i), (_level(level),)) for i, level in enumerate(levels))
            )


def _name(value: str | bool, texts: set[str]) -> str:
    """What the model reads for a value; a boolean says so only where a text of the same letters stands beside it."""
    if isinstance(value, str):
        return value
    word = "true" if value else "false"
    return f"{word} (boolean)" if word in texts else word


def _level(level: Level) -> str:
    return f"{level.label}: {level.description}" if level.description else level.label
