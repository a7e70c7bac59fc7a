"""The dashboard, the alerts and the page of documentation name the metrics that there are, with their labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from sakuradite.cluster.metrics import METRICS, PREFIX, Metric
from tests.promql import groupings, parse, selectors

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster-configs" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "sakuradite.json").read_text())
PAGE = (ROOT / "docs" / "observability.md").read_text()

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SERIES = ("_bucket", "_sum", "_count")
UNITS = {"bytes", "percentunit", "reqps", "ops", "s", "short"}


def expressions() -> list[tuple[str, str]]:
    """Every query of the dashboard, with its panel's title."""
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def alerts() -> list[tuple[str, str]]:
    """Every alert with its expression."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def metric_of(series: str) -> Metric:
    """The declared metric that a series belongs to; only a histogram has series of other names."""
    (found,) = [
        m
        for m in METRICS
        if series in ([PREFIX + m.name + s for s in SERIES] if m.kind == "histogram" else [PREFIX + m.name])
    ]
    return found


def labels_of(series: str) -> set[str]:
    """The labels that both ways of scraping give a series; `replica` is only at /metrics."""
    return {*metric_of(series).labels, *(["le"] if series.endswith("_bucket") else [])}


@pytest.mark.parametrize(("where", "expression"), expressions() + alerts(), ids=lambda text: text[:40])
def test_an_expression_names_metrics_and_labels_that_exist(where: str, expression: str) -> None:
    tree = parse(expression)
    for selector in selectors(tree):
        assert {m.name for m in selector.matchers.matchers} <= labels_of(selector.name), selector.name
    for labels, over in groupings(tree):
        for selector in selectors(over):
            assert set(labels) <= labels_of(selector.name), selector.name


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_every_metric_is_on_the_dashboard(metric: Metric) -> None:
    there = {metric_of(s.name) for _, expression in expressions() for s in selectors(parse(expression))}
    assert metric in there


def test_counters_are_only_shown_by_their_growth() -> None:
    """And gauges never are: the growth of a gauge says nothing."""
    for where, expression in expressions() + alerts():
        rated = set(re.findall(r"rate\((\w+)", expression))
        for selector in selectors(parse(expression)):
            assert (metric_of(selector.name).kind != "gauge") == (selector.name in rated), (where, selector.name)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert {"title", "uid", "schemaVersion", "templating", "time", "panels"} <= set(DASHBOARD)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns, lines = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        own = set(product(columns, lines))
        assert not cells & own, panel["title"]
        cells |= own
    for panel in PANELS:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_legends_use_labels_that_the_query_leaves() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            tree = parse(target["expr"])
            left = {label for labels, _ in groupings(tree) for label in labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == left - {"le"}, target["expr"]


def table() -> Iterator[str]:
    """The table of the documentation, line by line."""
    yield "| metric | type | of | labels | meaning |"
    yield "|---|---|---|---|---|"
    for m in METRICS:
        labels = ", ".join(f"`{label}`" for label in m.labels)
        yield f"| `{PREFIX}{m.name}` | {m.kind} | {m.process} | {labels} | {m.meaning} |"


def test_the_page_has_every_metric_and_no_other() -> None:
    assert "\n".join(table()) in PAGE, "\n".join(table())
    assert set(re.findall(rf"^\| `{PREFIX}(\w+)`", PAGE, re.MULTILINE)) == {metric.name for metric in METRICS}
    for series in re.findall(rf"\(({PREFIX}sakuradite_\w+)", PAGE):
        assert metric_of(series), series


def test_names_follow_prometheus_customs() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert "_ms" not in metric.name, "base units: seconds, bytes, tokens"
        assert metric.meaning[0].isupper() or metric.meaning[0].isdigit()
        assert (metric.buckets != ()) == (metric.kind == "histogram")
