"""Hands this process's figures to Ray's metric API, from where every node's metrics port shows them to Prometheus.

Ray's own histograms are not used: the node's agent would replay every observation one by one in Python, with the middle
of its bucket for its value. The series of a histogram (`_bucket`, `_sum`, `_count`) are set as gauges under their usual
names, so sums are exact, the cost does not grow with the load, and queries are the same.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sakuradite.cluster.metrics import METRICS, Meters

log = logging.getLogger(__name__)

EXPORT_SECONDS = 2.0
"""Ray's processes report to their node's agent every 10 s; a gauge that was not set for two reports is dropped."""


class Exporter:
    """What Ray was told last, and what it is told next."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._declared = {metric.name: metric for metric in METRICS}
        self._metrics: dict[str, Any] = {}
        self._told: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def tell(self) -> None:
        """Tell Ray of everything as it is now: some 2 us a series."""
        from ray.util.metrics import Counter, Gauge

        for family in self._meters.families():
            declared = self._declared[family.name]
            counter = declared.kind == "counter"
            for name, labels, value in family.samples:
                if (metric := self._metrics.get(name)) is None:
                    metric = (Counter if counter else Gauge)(name, declared.meaning, tuple(labels))
                    self._metrics[name] = metric
                if not counter:
                    metric.set(value, labels)
                    continue
                key = name, tuple(labels.items())
                if (more := value - self._told.get(key, 0.0)) > 0:
                    metric.inc(more, labels)
                    self._told[key] = value

    async def run(self) -> None:
        """Tell Ray every few seconds. Ends only by cancellation."""
        while True:
            try:
                self.tell()
            except Exception as error:  # a cluster in trouble still answers
                log.warning("metrics could not be exported: %s: %s", type(error).__name__, error)
            await asyncio.sleep(EXPORT_SECONDS)
