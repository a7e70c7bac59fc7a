"""A minute of the long run of tests/benchmarks/soak: all bounds hold in it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.soak.__main__ import soak
from tests.benchmarks.soak.memory import MiB, Trace, Trend, Watch


@pytest.mark.parametrize(
    ("last", "descriptors", "broken"),
    [(119, 10, False), (121, 10, True), (100, 34, False), (100, 35, True), (50, 5, False)],
)
def test_what_is_flat_and_what_is_not(last: int, descriptors: int, broken: bool) -> None:
    trend = Trend("router", 100.0 * MiB, last * MiB, 0.0, (10, descriptors))
    assert bool(trend.broken) == broken


def test_a_line_is_laid_through_what_was_seen_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(0)
    points = [(float(second), (100 if second < 40 else second) * MiB, 7) for second in range(0, 101, 5)]
    watch.traces = {1: Trace("leaks", points), 2: Trace("ended", points[:10]), 3: Trace("came late", points[15:])}
    monkeypatch.setattr("time.monotonic", lambda: watch._begun + 100)
    (trend,) = watch.trends()
    assert (trend.name, round(trend.first / MiB), round(trend.last / MiB)) == ("leaks", 40, 100)
    assert round(trend.per_hour / MiB) == 3600


@pytest.mark.ray
@pytest.mark.slow
def test_a_minute_at_full_load_with_churn(tmp_path: Path) -> None:
    outcome = soak(1.0, tmp_path, look=2.0)
    assert not outcome.broken, str(outcome)
    assert outcome.met.counts["second model unloaded"] > 1, outcome.met.counts
    assert {"sakuradite serve", "gcs_server", "raylet"} < {trend.name for trend in outcome.trends}, str(outcome)
