"""Every metric there is, declared once, and the ones that this process counts.

Counting is prometheus_client's, in this process, at about a microsecond a time; `exporting` hands the figures to Ray's
metric API every few seconds, `gathering` to whoever asks a router for `/metrics`. Both put `ray_` in front of the name,
as Ray does with all metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import prometheus_client
from prometheus_client.metrics import MetricWrapperBase

type Kind = Literal["counter", "gauge", "histogram"]
type Process = Literal["router", "catalog", "model"]

PREFIX = "ray_"

REQUEST_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
FORWARD_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True)
class Metric:
    """One metric: its name without the prefix, who counts it, what it means, its labels and, of a histogram, bounds."""

    name: str
    kind: Kind
    process: Process
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_MODEL = ("model",)

METRICS: tuple[Metric, ...] = (
    Metric("sakuradite_requests_total", "counter", "router",
           "HTTP requests answered, or given up by their caller (status 499)", ("dialect", "model", "status")),
    Metric("sakuradite_errors_total", "counter", "router",
           "Requests that were answered with an error, as their status or at the end of a stream",
           ("dialect", "model", "code")),
    Metric("sakuradite_request_seconds", "histogram", "router",
           "From the head of a decision's request to the end of its answer", ("dialect", "model"), REQUEST_SECONDS),
    Metric("sakuradite_requests_in_flight", "gauge", "router",
           "Decisions that the router holds: being read, waiting, computed or written"),
    Metric("sakuradite_request_bytes_in_flight", "gauge", "router",
           "Bytes of their bodies, decompressed"),
    Metric("sakuradite_calls_in_flight", "gauge", "router",
           "Calls from the router to replicas; waiting requests share one", _MODEL),
    Metric("sakuradite_retries_total", "counter", "router",
           "Requests sent once more because their replica died", _MODEL),
    Metric("sakuradite_models", "gauge", "catalog",
           "Models by state: loading, ready, draining, failed", ("state",)),
    Metric("sakuradite_replicas_wanted", "gauge", "catalog",
           "Replicas that a resident model should have, the least of a range", _MODEL),
    Metric("sakuradite_operations_total", "counter", "catalog",
           "Loads and pulls that ended", ("kind", "status")),
    Metric("sakuradite_replica_ready", "gauge", "model",
           "1 while the replica answers, 0 while it cannot; the sum is the model's ready replicas", _MODEL),
    Metric("sakuradite_load_seconds", "gauge", "model",
           "What the replica's start took: resolve (find or download the files), load (weights, tokenizer, probe)",
           ("model", "phase")),
    Metric("sakuradite_resident_bytes", "gauge", "model",
           "Memory by what holds it: weights, process (resident set of the process), device (reserved by PyTorch on "
           "its GPU)", ("model", "kind")),
    Metric("sakuradite_queue_requests", "gauge", "model",
           "Requests admitted and not yet answered", _MODEL),
    Metric("sakuradite_queue_bytes", "gauge", "model",
           "Bytes of those requests, as admission counts them", _MODEL),
    Metric("sakuradite_queue_rows", "gauge", "model",
           "Their questions that are compiled and have no answer yet", _MODEL),
    Metric("sakuradite_queue_tokens", "gauge", "model",
           "Prompt tokens of those requests, once compiled", _MODEL),
    Metric("sakuradite_decisions_total", "counter", "model",
           "Requests that ended in the engine, by the code of their error; `ok` for none, `cancelled` for a caller "
           "that went away", ("model", "code")),
    Metric("sakuradite_queue_seconds", "histogram", "model",
           "From a request's admission to its first forward, compilation included", _MODEL, REQUEST_SECONDS),
    Metric("sakuradite_compile_seconds_total", "counter", "model",
           "Time of the worker thread spent on prompts and tokens", _MODEL),
    Metric("sakuradite_forward_seconds", "histogram", "model",
           "Time of the worker thread for one batch", _MODEL, FORWARD_SECONDS),
    Metric("sakuradite_batch_rows", "histogram", "model",
           "Rows of a batch", _MODEL, ROWS),
    Metric("sakuradite_prompt_tokens_total", "counter", "model",
           "Tokens of the whole prompts of all rows: computed without padding, plus saved", _MODEL),
    Metric("sakuradite_computed_tokens_total", "counter", "model",
           "Tokens that forwards computed, padding included", _MODEL),
    Metric("sakuradite_padding_tokens_total", "counter", "model",
           "Of the computed ones, padding", _MODEL),
    Metric("sakuradite_prefix_saved_tokens_total", "counter", "model",
           "Prompt tokens that were not computed because rows share their prefix", _MODEL),
    Metric("sakuradite_halved_batches_total", "counter", "model",
           "Batches that did not fit the device and were computed in halves", _MODEL),
)  # fmt: skip


class Sample(NamedTuple):
    """One number of a family: the series' name without the prefix, its labels, its value."""

    name: str
    labels: dict[str, str]
    value: float


class Family(NamedTuple):
    """All numbers of one metric in one process, plain enough to travel."""

    name: str
    samples: list[Sample]


class Meters:
    """The metrics of one process, all there from the start. Without labels they begin at zero."""

    def __init__(self, process: Process) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for the birth of every series
        self._metrics = {m.name: self._made(m) for m in METRICS if m.process == process}
        self._refresh: list[Callable[[], None]] = []

    def _made(self, metric: Metric) -> MetricWrapperBase:
        if metric.kind == "counter":
            return prometheus_client.Counter(metric.name, metric.meaning, metric.labels, registry=self._registry)
        if metric.kind == "gauge":
            return prometheus_client.Gauge(metric.name, metric.meaning, metric.labels, registry=self._registry)
        return prometheus_client.Histogram(
            metric.name, metric.meaning, metric.labels, buckets=metric.buckets, registry=self._registry
        )

    def __getitem__(self, name: str) -> Any:
        """The metric of that name, to be counted on."""
        return self._metrics[name]

    def refresh(self, look: Callable[[], None]) -> None:
        """Call this before every reading, to set gauges."""
        self._refresh.append(look)

    def families(self) -> list[Family]:
        """What has been counted."""
        for look in self._refresh:
            look()
        names = {name.removesuffix("_total"): name for name in self._metrics}
        return [
            Family(names[found.name], [Sample(s.name, s.labels, s.value) for s in found.samples])
            for found in self._registry.collect()
        ]
