"""Response bodies that only the API reference needs as types: OpenAI answers, events, and the two error shapes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from sakuradite.answers import Answer, DecisionResult, Usage


class PredicateAnswer(BaseModel):
    """The probability that the statement is true."""

    type: Literal["predicate"]
    name: str | None
    probability: float


class ValueProbability(BaseModel):
    """One option of a choice."""

    value: str | bool
    probability: float


class OpenAIChoiceAnswer(BaseModel):
    """The most probable option."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ValueProbability]


class LevelProbability(BaseModel):
    """One level of a score."""

    value: int
    label: str
    probability: float


class OpenAIScoreAnswer(BaseModel):
    """The expected level, counted from 0."""

    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class InputTokensDetails(BaseModel):
    """Always 0: what reuse saved is not subtracted."""

    cached_tokens: Literal[0] = 0
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(BaseModel):
    """Always 0: nothing is generated."""

    reasoning_tokens: Literal[0] = 0


class OpenAIUsage(BaseModel):
    """Tokens of all questions' full prompts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: Literal[0] = 0
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OpenAIDecision(BaseModel):
    """All answers in the order of the questions."""

    model: str
    answers: list[Annotated[PredicateAnswer | OpenAIChoiceAnswer | OpenAIScoreAnswer, Field(discriminator="type")]]
    usage: OpenAIUsage


class AnswerEvent(BaseModel):
    """`event: answer`. One question is answered; `key` is its id."""

    type: Literal["answer"]
    model: str
    key: str
    answer: Answer
    usage: Usage = Field(description="Of this question alone.")


class CompleteEvent(DecisionResult):
    """`event: complete`. The whole result, as in a response that does not stream. The last event of a success."""

    type: Literal["complete"]


class ErrorEvent(BaseModel):
    """`event: error`. The last event of a stream that failed after its first answer."""

    type: Literal["error"]
    code: str
    message: str
    status_code: int
    param: str | None = None


type Event = Annotated[AnswerEvent | CompleteEvent | ErrorEvent, Field(discriminator="type")]


class Problem(BaseModel):
    """One field of a request that is wrong."""

    loc: list[str | int] = Field(description="From `body`, `query` or `path` down to the field.")
    msg: str
    type: str


class ErrorBody(BaseModel):
    """What went wrong."""

    code: str
    message: str
    type: str = Field(description="A family of codes, as the openai client knows them.")
    param: str | None = Field(description="The path of the offending field.")


class ErrorResponse(BaseModel):
    """An error of every route but System One's."""

    error: ErrorBody


class ValidationErrorResponse(ErrorResponse):
    """A 422: `detail` lists every field that is wrong."""

    detail: list[Problem]


class SystemOneErrorBody(BaseModel):
    """What went wrong."""

    error_type: Literal[
        "authentication_error",
        "api_usage_error",
        "max_tokens_exceeded",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "api_error",
    ]
    message: str


class SystemOneErrorResponse(BaseModel):
    """An error of System One's route."""

    detail: SystemOneErrorBody


class SystemOneValidationErrorResponse(BaseModel):
    """A 422 of System One's route."""

    detail: list[Problem]
