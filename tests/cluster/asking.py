"""Requests for tests of the cluster, and their answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from sakuradite.records import Candidate, Outcome, QuestionRecord, RequestRecord, RowAnswer


class Decides(Protocol):
    def decide(self, request: RequestRecord) -> AsyncGenerator[list[Outcome]]: ...


def request(
    text: str = "The parcel was late.", questions: int = 3, id_: str = "r", timeout: float | None = None,
    images: tuple[bytes, ...] = (),
) -> RequestRecord:  # fmt: skip
    """A request with some choices about a text."""
    return RequestRecord(
        id_,
        (text,),
        tuple(
            QuestionRecord("choice", (f"What of {i}?",), (Candidate("a", ("one",)), Candidate("b", ("two",))))
            for i in range(questions)
        ),
        images,
        timeout,
    )


async def outcomes(model: Decides, record: RequestRecord) -> dict[int, Outcome]:
    """Every outcome by its row; each row comes exactly once."""
    found: dict[int, Outcome] = {}
    async for group in model.decide(record):
        for outcome in group:
            assert outcome.row not in found
            found[outcome.row] = outcome
    return found


async def answers(model: Decides, record: RequestRecord) -> dict[int, tuple[float, ...]]:
    """The probabilities by row; every row must have been answered."""
    found = await outcomes(model, record)
    assert all(isinstance(outcome, RowAnswer) for outcome in found.values()), found
    return {row: outcome.probabilities for row, outcome in found.items() if isinstance(outcome, RowAnswer)}
