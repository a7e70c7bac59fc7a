"""The page of `/metrics`: figures of every router, replica and the catalog, asked for when it is, as one text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from sakuradite.cluster.metrics import METRICS, PREFIX, Family

log = logging.getLogger(__name__)

ANSWER_SECONDS = 3.0
"""A process that does not answer within this is left out; Prometheus itself waits 10 s."""

type Figures = tuple[str, list[Family]]
"""The name of a replica, and what it counted."""


class _Merged(Collector):
    """Families of several processes, each metric once, told apart by the label `replica`."""

    def __init__(self, figures: Iterable[Figures]) -> None:
        self._families: dict[str, PrometheusMetric] = {}
        for metric in METRICS:
            family = PrometheusMetric(PREFIX + metric.name.removesuffix("_total"), metric.meaning, metric.kind)
            self._families[metric.name] = family
        for replica, families in figures:
            for name, samples in families:
                for series, labels, value in samples:
                    self._families[name].add_sample(PREFIX + series, {**labels, "replica": replica}, value)

    def collect(self) -> Iterator[PrometheusMetric]:
        yield from self._families.values()


def text(figures: Iterable[Figures]) -> bytes:
    """The figures in Prometheus' text format, every metric with its meaning and type."""
    return prometheus_client.generate_latest(_Merged(figures))


async def gather(handles: dict[str, Any]) -> list[Figures]:
    """What the replicas of deployments answer to `figures`; those that do not answer in time are left out."""
    answers = await asyncio.gather(*(_ask(name, handle) for name, handle in handles.items()))
    return [figures for answer in answers for figures in answer]


async def _ask(name: str, handle: Any) -> list[Figures]:
    try:
        answers = await handle.broadcast("figures").results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]
    except Exception as error:  # a replica may die at any moment, and the others still have figures
        log.warning("no metrics from %s: %s", name, type(error).__name__)
        return []
