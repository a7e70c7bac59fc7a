"""What is to be computed for a request: for each question the rows to score and how their reads make one answer.

A question is one row with one read today; labels of two tokens take a row per first token. Several reads per row, and
several rows per question, are the general case that readouts to come build on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sakuradite.engine.backend import Prefix, Row, RowScores
from sakuradite.engine.labels import Labels
from sakuradite.records import RowFailure


@dataclass(slots=True, eq=False)
class PlannedQuestion:
    """The rows of one question, all after the same prefix, and the scores that have come back for them."""

    index: int
    prefix: Prefix
    rows: tuple[Row, ...]
    labels: Labels
    input_tokens: int
    """Tokens of the question's whole prompt, whatever reuse saves."""
    scores: dict[int, RowScores | Exception] = field(default_factory=dict)
    """What has come back, by the row's number; complete when every row is there."""


@dataclass(slots=True, eq=False)
class Plan:
    """A compiled request. `failures` are the questions that cannot be asked, such as those over the context."""

    questions: list[PlannedQuestion]
    failures: list[RowFailure]
