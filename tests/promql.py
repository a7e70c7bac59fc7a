"""PromQL over pages that were scraped, as far as our dashboard and alerts use it. The grammar is Prometheus' own.

    series = Series([(0.0, page), (15.0, page), ...])
    evaluate("sum by (model) (rate(ray_sakuradite_requests_total[1m]))", series, at=15.0)

A vector is a dict from a frozenset of labels to a number. `rate` has no extrapolation to the edges of its window.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import promql_parser as promql

from tests.cluster.scraping import Page

type Labels = frozenset[tuple[str, str]]
type Vector = dict[Labels, float]

AGGREGATES: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}
ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else math.nan,
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
}


@dataclass
class Series:
    """Pages by the second at which they were read, oldest first."""

    pages: list[tuple[float, Page]] = field(default_factory=list)

    def latest(self, name: Any, at: float) -> Vector:
        """The values of the last page that is not newer."""
        for moment, page in reversed(self.pages):
            if moment <= at:
                return page.vector(name)
        return {}

    def window(self, name: str, at: float, seconds: float) -> dict[Labels, list[tuple[float, float]]]:
        """Each series' points of the last so many seconds."""
        points: dict[Labels, list[tuple[float, float]]] = {}
        for moment, page in self.pages:
            if at - seconds <= moment <= at:
                for labels, value in page.vector(name).items():
                    points.setdefault(labels, []).append((moment, value))
        return points


def parse(expression: str, interval: str = "1m") -> Any:
    """The expression's tree. Grafana's variables become values: everything, and the interval."""
    text = expression.replace("$__rate_interval", interval).replace('"$model"', '".*"')
    assert "$" not in text, f"an unknown variable in {expression}"
    return promql.parse(text)


def selectors(tree: Any) -> Iterator[Any]:
    """Every selector of an expression."""
    if isinstance(tree, promql.VectorSelector):
        yield tree
    elif isinstance(tree, promql.MatrixSelector):
        yield tree.vector_selector
    else:
        for part in ("lhs", "rhs", "expr", "param"):
            if getattr(tree, part, None) is not None:
                yield from selectors(getattr(tree, part))
        for argument in getattr(tree, "args", []):
            yield from selectors(argument)


def groupings(tree: Any) -> Iterator[tuple[list[str], Any]]:
    """Every `by (…)` of an expression, with what it is over."""
    if isinstance(tree, promql.AggregateExpr) and tree.modifier is not None:
        yield tree.modifier.labels, tree.expr
    for part in ("lhs", "rhs", "expr"):
        if getattr(tree, part, None) is not None:
            yield from groupings(getattr(tree, part))
    for argument in getattr(tree, "args", []):
        yield from groupings(argument)


def evaluate(expression: str, series: Series, at: float, interval: str = "1m") -> Vector:
    """The value at a moment; a scalar has no labels."""
    return _value(parse(expression, interval), series, at)


def _value(tree: Any, series: Series, at: float) -> Vector:
    match tree:
        case promql.NumberLiteral():
            return {frozenset(): float(tree.val)}
        case promql.ParenExpr():
            return _value(tree.expr, series, at)
        case promql.VectorSelector():
            return {labels: v for labels, v in series.latest(tree.name, at).items() if _matches(tree, labels)}
        case promql.AggregateExpr():
            return _aggregate(tree, _value(tree.expr, series, at))
        case promql.BinaryExpr():
            return _binary(str(tree.op), _value(tree.lhs, series, at), _value(tree.rhs, series, at))
        case promql.Call():
            return _call(tree, series, at)
    raise NotImplementedError(type(tree).__name__)


def _matches(selector: Any, labels: Labels) -> bool:
    found = dict(labels)
    for matcher in selector.matchers.matchers:
        value, kind = found.get(matcher.name, ""), str(matcher.op)
        regular = re.fullmatch(matcher.value, value) is not None if "Re" in kind else value == matcher.value
        if regular == ("Not" in kind):
            return False
    return True


def _aggregate(tree: Any, vector: Vector) -> Vector:
    by = tree.modifier.labels if tree.modifier is not None else []
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(frozenset((k, v) for k, v in labels if k in by), []).append(value)
    return {labels: AGGREGATES[str(tree.op)](values) for labels, values in groups.items()}


def _binary(op: str, left: Vector, right: Vector) -> Vector:
    if op == "or":
        return right | left
    one = len(right) == 1 and frozenset() in right
    other = len(left) == 1 and frozenset() in left and not one
    pairs = (
        {labels: (v, right[frozenset()]) for labels, v in left.items()}
        if one
        else {labels: (left[frozenset()], v) for labels, v in right.items()}
        if other
        else {labels: (v, right[labels]) for labels, v in left.items() if labels in right}
    )
    if op in COMPARISONS:
        return {labels: a for labels, (a, b) in pairs.items() if COMPARISONS[op](a, b)}
    return {labels: ARITHMETIC[op](a, b) for labels, (a, b) in pairs.items()}


def _call(tree: Any, series: Series, at: float) -> Vector:
    name, arguments = tree.func.name, tree.args
    if name == "rate":
        (over,) = arguments
        points = series.window(over.vector_selector.name, at, over.range.total_seconds())
        return {
            labels: _rate(found)
            for labels, found in points.items()
            if len(found) > 1 and _matches(over.vector_selector, labels)
        }
    values = [_value(argument, series, at) for argument in arguments]
    if name == "vector":
        return values[0]
    if name == "absent":
        return {} if values[0] else {frozenset(): 1.0}
    if name == "clamp_min":
        return {labels: max(value, values[1][frozenset()]) for labels, value in values[0].items()}
    if name == "histogram_quantile":
        return _quantiles(values[0][frozenset()], values[1])
    raise NotImplementedError(name)


def _rate(points: list[tuple[float, float]]) -> float:
    """Growth per second; a fall is a process that began anew."""
    grown = sum(b if b < a else b - a for (_, a), (_, b) in pairwise(points))
    return grown / (points[-1][0] - points[0][0])


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(frozenset(pair for pair in labels if pair[0] != "le"), []).append((bound, value))
    return {labels: _quantile(quantile, sorted(found)) for labels, found in groups.items()}


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    """Prometheus' own rule: linear within a bucket, the last finite bound beyond."""
    rank = quantile * buckets[-1][1]
    if not buckets[-1][1]:
        return math.nan
    low = below = 0.0
    for bound, count in buckets:
        if count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
