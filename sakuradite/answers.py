"""Answers as a user reads them, and the one function for each number in them.

Probabilities are normalised over the candidates that were supplied; they are not calibrated guarantees of correctness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sakuradite.questions import Choice, Content, Noul, Score
from sakuradite.records import RowAnswer


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class NoulAnswer(_Frozen):
    """`noul` is the probability that the statement is true."""

    type: Literal["noul"] = "noul"
    noul: float
    x_label_mass: float | None = None
    """The probability that the model gave to both labels together before they were normalised."""


class ChoiceAnswer(_Frozen):
    """`choice` is the most probable option (the first on a tie), `confidence` is `choice_confidence`."""

    type: Literal["choice"] = "choice"
    choice: str
    confidence: float
    probabilities: dict[str, float]
    x_label_mass: float | None = None


class ScoreAnswer(_Frozen):
    """`score` is the expected zero-based position, `legend` repeats the levels, `confidence` is `score_confidence`."""

    type: Literal["score"] = "score"
    score: float
    confidence: float
    legend: dict[str, Content]
    probabilities: dict[str, float]
    x_label_mass: float | None = None


type Answer = Annotated[NoulAnswer | ChoiceAnswer | ScoreAnswer, Field(discriminator="type")]
"""Any of the three answer types, told apart by `type`."""


class Usage(_Frozen):
    """`input_tokens` sums the full prompts of the questions, whatever reuse saved. Nothing is generated."""

    input_tokens: int
    output_tokens: Literal[0] = 0


class DecisionResult(_Frozen):
    """All answers to one request, in the order of its questions."""

    model: str
    answers: dict[str, Answer]
    usage: Usage

    @property
    def nouls(self) -> dict[str, NoulAnswer]:
        """The noul answers by question id."""
        return {key: a for key, a in self.answers.items() if isinstance(a, NoulAnswer)}

    @property
    def choices(self) -> dict[str, ChoiceAnswer]:
        """The choice answers by question id."""
        return {key: a for key, a in self.answers.items() if isinstance(a, ChoiceAnswer)}

    @property
    def scores(self) -> dict[str, ScoreAnswer]:
        """The score answers by question id."""
        return {key: a for key, a in self.answers.items() if isinstance(a, ScoreAnswer)}


def choice_confidence(probabilities: Sequence[float]) -> float:
    """(max p - 1/n) / (1 - 1/n): 0 when all n options are alike, 1 when one is certain; 1 when n is 1."""
    n = len(probabilities)
    return 1.0 if n == 1 else max(0.0, (max(probabilities) - 1 / n) / (1 - 1 / n))


def score_confidence(probabilities: Sequence[float]) -> float:
    """1 - (mean distance to the most probable level) / (the same for a uniform spread around the middle), at least 0.

    With k the most probable level (the first on ties): max(0, 1 - sum_i p_i |i - k| / D),
    D = (1/n) sum_i |i - (n-1)/2|; 1 when n is 1.
    """
    n = len(probabilities)
    if n == 1:
        return 1.0
    k = probabilities.index(max(probabilities))
    spread = sum(p * abs(i - k) for i, p in enumerate(probabilities))
    uniform = sum(abs(i - (n - 1) / 2) for i in range(n)) / n
    return max(0.0, 1 - spread / uniform)


def expected_score(probabilities: Sequence[float]) -> float:
    """sum_i i p_i: the expected zero-based position."""
    return sum(i * p for i, p in enumerate(probabilities))


def answer(question: Noul | Choice | Score, row: RowAnswer) -> NoulAnswer | ChoiceAnswer | ScoreAnswer:
    """The typed answer of a question from its scored row."""
    p = row.probabilities
    match question:
        case Noul():
            return NoulAnswer(noul=p[0], x_label_mass=row.label_mass)
        case Choice(criteria=options):
            names = list(options)
            return ChoiceAnswer(
                choice=names[p.index(max(p))],
                confidence=choice_confidence(p),
                probabilities=dict(zip(names, p, strict=True)),
                x_label_mass=row.label_mass,
            )
        case Score(criteria=levels):
            keys = [str(i) for i in range(len(levels))]
            return ScoreAnswer(
                score=expected_score(p),
                confidence=score_confidence(p),
                legend=dict(zip(keys, levels, strict=True)),
                probabilities=dict(zip(keys, p, strict=True)),
                x_label_mass=row.label_mass,
            )


def result(model: str, questions: Mapping[str, Noul | Choice | Score], rows: Mapping[int, RowAnswer]) -> DecisionResult:
    """The whole result from the scored rows by index; every row must be there."""
    answers: dict[str, Any] = {key: answer(q, rows[i]) for i, (key, q) in enumerate(questions.items())}
    return DecisionResult(
        model=model, answers=answers, usage=Usage(input_tokens=sum(row.input_tokens for row in rows.values()))
    )
