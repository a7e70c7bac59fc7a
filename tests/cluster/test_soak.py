"""A minute of the long run of tests/benchmarks/soak: all bounds hold in it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.soak.__main__ import soak

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_minute_at_full_load_with_churn(tmp_path: Path) -> None:
    outcome = soak(1.0, tmp_path, look=2.0)
    assert not outcome.broken, str(outcome)
    assert outcome.met.counts["second model unloaded"] > 1, outcome.met.counts
    assert {"sakuradite serve", "gcs_server", "raylet"} < {trend.name for trend in outcome.trends}, str(outcome)
