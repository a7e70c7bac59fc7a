"""OpenTelemetry traces, where OpenTelemetry's own environment variables ask for them.

Spans hold names of models, codes, counts and times, never a word of a request. A router's span has the model's below
it, and that has `compile`, `queue` and one `forward` per batch that computed rows of the request.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sakuradite.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from sakuradite.engine.observing import Account

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SERVICE = "sakuradite"


def wanted() -> bool:
    """Whether the environment asks for traces: an OTLP endpoint is named, and nothing turns them off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(os.environ.get(name) for name in ENDPOINTS)


def check() -> None:
    """Raise MissingExtraError or ConfigurationError where traces are wanted and cannot be had."""
    if not wanted():
        return
    name = next(name for name in ENDPOINTS if os.environ.get(name))
    try:
        there = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise MissingExtraError(f"{name} asks for traces: OpenTelemetry", "otel")
    for variable in PROTOCOLS:
        if (protocol := os.environ.get(variable)) and protocol != "http/protobuf":
            raise ConfigurationError(
                f"{variable}={protocol}: traces are sent by http/protobuf; unset it and name the collector's HTTP port "
                "(4318 by custom)",
                param=variable,
            )
        if protocol:
            break  # the one for traces wins


class Tracing:
    """The spans of one process, sent in the background. `close` sends what is left."""

    def __init__(self, process: str) -> None:
        """Raises as `check` does."""
        check()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win, by OpenTelemetry's own rules.
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE}
        resource = Resource.create({**named, "service.instance.id": f"{process}-{os.getpid()}"})
        self._provider = TracerProvider(resource=resource)  # the sampler is the environment's
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()
        # Accounts have monotonic times, spans those of the wall clock in nanoseconds.
        self._offset = time.time() - time.monotonic()

    def serve(self, name: str, headers: dict[str, str]) -> Span:
        """A span for a request that came with these headers, under the caller's where they name one."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(name, self._propagator.extract(headers), SpanKind.SERVER)

    def parent_of(self, span: Span) -> str:
        """What a process further down needs to hang its spans below this one."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def end(self, span: Span, attributes: dict[str, Any], failed: bool) -> None:
        """End a span, with what it turned out to be. Empty values are left out."""
        from opentelemetry.trace import StatusCode

        span.set_attributes({name: value for name, value in attributes.items() if value not in ("", None)})
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end()

    def account(self, parent: str, model: str, account: Account, request_id: str) -> None:
        """The spans of a request in the engine, after the fact."""
        from opentelemetry.trace import set_span_in_context

        above = self._propagator.extract({"traceparent": parent} if parent else {})
        span = self._tracer.start_span("model", above, start_time=self._nanoseconds(account.admitted))
        if span.is_recording():
            below = set_span_in_context(span)
            if account.compiled:
                self._part("compile", below, account.compiling, account.compiled, {})
                first = account.batches[0].started if account.batches else account.ended
                self._part("queue", below, account.compiled, max(first, account.compiled), {})
            for batch in account.batches:
                self._part(
                    "forward",
                    below,
                    batch.started,
                    batch.started + batch.seconds,
                    {
                        "sakuradite.batch.rows": batch.rows,
                        "sakuradite.batch.computed_tokens": batch.computed_tokens,
                        "sakuradite.batch.padding_tokens": batch.padding_tokens,
                    },
                )
            span.set_attributes(
                {
                    "sakuradite.model": model,
                    "sakuradite.request_id": request_id,
                    "sakuradite.input_tokens": account.input_tokens,
                    **({"error.type": account.code} if account.code else {}),
                }
            )
        if account.code:
            from opentelemetry.trace import StatusCode

            span.set_status(StatusCode.ERROR)
        span.end(self._nanoseconds(account.ended))

    def close(self) -> None:
        """Send what is left. Blocks for at most some seconds."""
        self._provider.shutdown()

    def _part(self, name: str, below: Any, start: float, end: float, attributes: dict[str, Any]) -> None:
        span = self._tracer.start_span(name, below, start_time=self._nanoseconds(start), attributes=attributes)
        span.end(self._nanoseconds(end))

    def _nanoseconds(self, moment: float) -> int:
        return int((moment + self._offset) * 1e9)
