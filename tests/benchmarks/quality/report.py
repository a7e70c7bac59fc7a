"""The table of the quality benchmark: shares of right answers with error bars, and differences between two runs.

The error bars are those of the cases: how far a share would move had other cases of this kind been written. Questions
about one state are not independent, so all of it resamples states, not questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.benchmarks.quality.scoring import Case, Scored

RESAMPLES = 4000
KINDS = ("noul", "choice", "score")
EASY = ("noul", "choice")


@dataclass(frozen=True, slots=True)
class Share:
    """A share in percent with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.0f}, {self.high:.0f}]"


def is_right(case: Case, scored: Scored) -> bool:
    """Whether the most probable candidate is the right one (the first on a tie)."""
    p = scored.probabilities
    return p.index(max(p)) == case.right


def share(cases: Sequence[Case], run: Sequence[Scored], kinds: Sequence[str] = KINDS) -> Share:
    """Right answers among the cases of these kinds; the interval is Wilson's, widened by the clustering in states.

    Wilson's interval with n / d cases in place of n, where d is the variance of the share over resampled states divided
    by its variance with independent questions, at least 1.
    """
    hits, totals = _by_state(cases, run, kinds)
    n, right = totals.sum(), hits.sum()
    p = right / n
    spread = _resampled(hits, totals).var()
    design = max(1.0, spread / (p * (1 - p) / n)) if 0 < p < 1 else 1.0
    low, high = wilson(p, n / design)
    return Share(100 * p, 100 * low, 100 * high)


def wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share p of n."""
    z = 1.959964
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def difference(
    cases: Sequence[Case], run: Sequence[Scored], base: Sequence[Scored], kinds: Sequence[str] = KINDS
) -> Share:
    """Percentage points by which `run` beats `base` on the same cases, with the bootstrap's 95 % interval."""
    hits, totals = _by_state(cases, run, kinds)
    others, _ = _by_state(cases, base, kinds)
    low, high = np.percentile(100 * _resampled(hits - others, totals), [2.5, 97.5])
    return Share(float(100 * (hits - others).sum() / totals.sum()), float(low), float(high))


def log_loss(cases: Sequence[Case], run: Sequence[Scored], kinds: Sequence[str] = KINDS) -> float:
    """Mean of -ln(probability of the right candidate): lower is better, and it sees more than right or wrong."""
    values = [
        -math.log(max(s.probabilities[c.right], 1e-12))
        for c, s in zip(cases, run, strict=True)
        if c.question.kind in kinds
    ]
    return sum(values) / len(values)


def label_mass(run: Sequence[Scored]) -> tuple[float, float]:
    """Mean and smallest probability that the model gave to all labels together."""
    masses = [s.mass for s in run]
    return sum(masses) / len(masses), min(masses)


def score_error(cases: Sequence[Case], run: Sequence[Scored]) -> float:
    """Mean distance between the expected level and the right one, as a share of the scale."""
    errors = [
        abs(sum(i * p for i, p in enumerate(s.probabilities)) - c.right) / (len(s.probabilities) - 1)
        for c, s in zip(cases, run, strict=True)
        if c.question.kind == "score"
    ]
    return sum(errors) / len(errors)


def _by_state(
    cases: Sequence[Case], run: Sequence[Scored], kinds: Sequence[str]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Right answers and questions of each state."""
    hits: dict[str, float] = {}
    totals: dict[str, float] = {}
    for case, scored in zip(cases, run, strict=True):
        if case.question.kind in kinds:
            hits[case.state_id] = hits.get(case.state_id, 0) + is_right(case, scored)
            totals[case.state_id] = totals.get(case.state_id, 0) + 1
    return np.array(list(hits.values())), np.array(list(totals.values()))


def _resampled(
    hits: np.ndarray[tuple[int], np.dtype[np.float64]], totals: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The share in each of RESAMPLES draws of states with replacement."""
    draws = np.random.default_rng(0).integers(len(totals), size=(RESAMPLES, len(totals)))
    shares: np.ndarray[tuple[int], np.dtype[np.float64]] = hits[draws].sum(1) / totals[draws].sum(1)
    return shares


def table(cases: Sequence[Case], results: Mapping[str, Mapping[str, Sequence[Scored]]], base: str) -> str:
    """The results by model and wording as a Markdown table, the best log-loss first."""
    lines = [
        "| model | wording | noul | choice | noul and choice | against the base | score | error of score | log-loss "
        "| label mass (least) | tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, runs in results.items():
        for name, run in sorted(runs.items(), key=lambda item: log_loss(cases, item[1])):
            against = "" if name == base or base not in runs else str(difference(cases, run, runs[base], EASY))
            mass, least = label_mass(run)
            cells = (
                model,
                name,
                share(cases, run, ("noul",)),
                share(cases, run, ("choice",)),
                share(cases, run, EASY),
                against,
                share(cases, run, ("score",)),
                f"{score_error(cases, run):.2f}",
                f"{log_loss(cases, run):.3f}",
                f"{mass:.2f} ({least:.2f})",
                f"{sum(s.tokens for s in run) / len(run):.0f}",
            )
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)
