"""What carries a decision to a model and its answers back: embedded or over HTTP, behind one protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from sakuradite.answers import Answer, DecisionResult, Usage
from sakuradite.client.request import Decision


class AnswerEvent(BaseModel):
    """One question is answered. `usage` is that question's."""

    model_config = ConfigDict(frozen=True)

    type: Literal["answer"] = "answer"
    model: str
    key: str
    answer: Answer
    usage: Usage


class CompleteEvent(DecisionResult):
    """All questions are answered: the whole result, as without streaming. The last event of a stream."""

    type: Literal["complete"] = "complete"


type StreamEvent = AnswerEvent | CompleteEvent


class Transport(Protocol):
    """Used from one event loop. Every failure is a SakuraditeError."""

    async def open(self) -> None:
        """Make ready; nothing to undo when it raises or is cancelled."""

    async def decide(self, decision: Decision) -> DecisionResult:
        """The whole result, or the first failure in the order of the questions."""

    def stream(self, decision: Decision) -> AsyncGenerator[StreamEvent]:
        """Answers as they come, unchecked (`stream` checks), then the result. Closing it early cancels the rest."""

    async def close(self) -> None:
        """Release everything."""
