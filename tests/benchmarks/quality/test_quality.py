"""The cases are whole and balanced, and the table's numbers are what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from string import ascii_uppercase

import pytest

from sakuradite.engine.prompt import WORDING, question_text
from sakuradite.records import Kind, QuestionRecord
from tests.benchmarks.quality import report
from tests.benchmarks.quality.scoring import Case, Model, Run, Scored, read_cases, score
from tests.benchmarks.quality.shipped import shipped
from tests.benchmarks.quality.wordings import WORDINGS


def test_there_are_enough_cases_of_every_kind_and_domain() -> None:
    cases = read_cases()
    kinds = Counter(case.question.kind for case in cases)
    assert kinds == {"noul": 113, "choice": 69, "score": 39}
    assert len({case.state_id for case in cases}) == 96
    assert min(Counter(case.domain for case in cases).values()) >= 10


def test_no_kind_can_be_answered_by_habit() -> None:
    """Right answers are spread over yes and no, over the positions of the options, over the ends of the scale."""
    cases = read_cases()
    nouls = Counter(case.right for case in cases if case.question.kind == "noul")
    assert abs(nouls[0] - nouls[1]) <= 3
    choices = [case for case in cases if case.question.kind == "choice"]
    chance = sum(1 / len(case.question.candidates) for case in choices)
    for position in range(3):
        assert sum(case.right == position for case in choices) < 1.4 * chance
    scores = [case for case in cases if case.question.kind == "score"]
    at_ends = Counter(
        "low" if case.right == 0 else "high" if case.right == len(case.question.candidates) - 1 else "middle"
        for case in scores
    )
    assert max(at_ends.values()) < 0.4 * len(scores)


def test_every_wording_shows_every_option() -> None:
    for name, wording in WORDINGS.items():
        for case in read_cases():
            text = question_text(case.question, ascii_uppercase[: len(case.question.candidates)], wording)
            for candidate in case.question.candidates:
                assert candidate.description is None or str(candidate.description[0]) in text, name
                assert case.question.kind != "choice" or candidate.name in text, name


async def test_packed_rows_score_as_the_engine_does(tiny: Callable[..., Path]) -> None:
    """Several states, questions and runs in one sequence give what the engine gives; turned runs come back in order."""
    folder = tiny("qwen2")
    cases = [case for case in read_cases() if case.state_id in ("001", "005", "082")]
    engine = await shipped(folder, "float32", cases)
    packed, again, turned = score(
        Model(folder, "float32"), [Run(WORDING), Run(WORDING), Run(WORDING, turned=True)], cases
    )
    for i, (case, wanted) in enumerate(zip(cases, engine, strict=True)):
        for found in (packed[i], again[i]):
            assert found.probabilities == pytest.approx(wanted.probabilities, abs=1e-5)
            assert found.mass == pytest.approx(wanted.mass, abs=1e-5)
            assert found.tokens == wanted.tokens
        if case.question.kind == "choice":
            back = QuestionRecord("choice", case.question.instructions, case.question.candidates[::-1])
            (alone,) = await shipped(folder, "float32", [Case("x", "d", case.state, back, 0)])
            assert turned[i].probabilities == pytest.approx(alone.probabilities[::-1], abs=1e-5)
        elif case.question.kind == "score":
            assert turned[i].probabilities == pytest.approx(packed[i].probabilities, abs=1e-5)


def cases_of(count: int, states: int) -> list[Case]:
    question = QuestionRecord("noul", ("x",), ())
    return [Case(str(i % states), "d", "s", question, 0) for i in range(count)]


def run_of(right: int, count: int) -> list[Scored]:
    return [Scored((0.9, 0.1) if i < right else (0.2, 0.8), 0.5 + 0.4 * (i < right), 10) for i in range(count)]


@pytest.mark.parametrize(
    ("p", "n", "low", "high"), [(0.5, 100, 0.4038, 0.5962), (0.95, 182, 0.9081, 0.9734), (1.0, 20, 0.8389, 1.0)]
)
def test_wilson(p: float, n: int, low: float, high: float) -> None:
    """Against the values of the published formula, as other programs give them."""
    assert report.wilson(p, n) == pytest.approx((low, high), abs=2e-4)


def test_share_has_wilsons_interval_and_clusters_widen_it() -> None:
    alone = report.share(cases_of(100, 100), run_of(80, 100))
    assert alone.value == pytest.approx(80)
    assert (alone.low, alone.high) == pytest.approx((71.1, 86.7), abs=0.8)
    same = [Case(str(i // 10), "d", "s", c.question, 0) for i, c in enumerate(cases_of(100, 100))]
    clustered = report.share(same, run_of(80, 100))  # ten states, each wholly right or wholly wrong
    assert clustered.value == pytest.approx(80)
    assert clustered.high - clustered.low > 2 * (alone.high - alone.low)


def test_difference_is_paired() -> None:
    cases = cases_of(100, 100)
    same = report.difference(cases, run_of(80, 100), run_of(80, 100))
    assert (same.value, same.low, same.high) == (0, 0, 0)
    better = report.difference(cases, run_of(90, 100), run_of(80, 100))
    assert better.value == pytest.approx(10)
    assert 3 < better.low < 10 < better.high < 17


def test_table_has_a_line_for_every_run_the_best_first() -> None:
    kinds: tuple[Kind, ...] = ("noul", "choice", "score") * 10
    cases = [Case(str(i), "d", "s", QuestionRecord(kind, ("x",), ()), 0) for i, kind in enumerate(kinds)]
    text = report.table(cases, {"m": {"worse": run_of(15, 30), "base": run_of(27, 30)}}, "base")
    lines = text.splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["base", "worse"]
    assert "-40.0 [" in lines[1]
    assert report.label_mass(run_of(15, 30)) == pytest.approx((0.7, 0.5))
    assert report.score_error(cases, run_of(30, 30)) == pytest.approx(0.1)
