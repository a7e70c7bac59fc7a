"""What the cluster makes of what can be seen: metrics, log lines and spans, of the router and of a model's replica."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sakuradite.cluster.logs import QUIET_ROUTES, Lines, request_id_of
from sakuradite.cluster.metrics import Meters
from sakuradite.cluster.tracing import Tracing
from sakuradite.records import RequestRecord

if TYPE_CHECKING:
    from sakuradite.engine.observing import Account, Batch
    from sakuradite.http.exchange import Exchange

access_log = logging.getLogger("sakuradite.access")
engine_log = logging.getLogger("sakuradite.decisions")

DECIDING = ("native", "openai", "systemone")
FORESEEN = ("capacity_exceeded", "inference_failed", "internal_error", "replica_unavailable", "request_timeout")
"""Codes that alerts look at. Their series begin at zero when a model is ready: the growth of one that appears with its
first error cannot be seen."""


class RouterObserver:
    """Counts and tells of HTTP requests. Belongs to one event loop."""

    def __init__(self, meters: Meters, tracing: Tracing | None, lines: Lines) -> None:
        self._meters, self._tracing, self._lines = meters, tracing, lines
        self._spans: dict[Exchange, Any] = {}
        # Finding a child by its labels costs more than counting on it, and there are few.
        self._requests: dict[tuple[str, str, int], Any] = {}
        self._seconds: dict[tuple[str, str], Any] = {}

    def expect(self, model: str) -> None:
        """A model is ready: begin what will be looked at."""
        for dialect in DECIDING:
            for code in FORESEEN:
                self._meters["sakuradite_errors_total"].labels(dialect, model, code)

    def began(self, exchange: Exchange) -> None:
        """Open a span for a decision, and leave its name for the model's."""
        if self._tracing is not None and exchange.account.dialect in DECIDING:
            headers = {name: exchange.headers[name.encode()].decode("latin-1") for name in ("traceparent", "tracestate")
                       if name.encode() in exchange.headers}  # fmt: skip
            span = self._tracing.serve(f"{exchange.method} {exchange.path}", headers)
            self._spans[exchange] = span
            exchange.account.trace = self._tracing.parent_of(span)

    def ended(self, exchange: Exchange) -> None:
        """Count it, write its line, end its span."""
        account = exchange.account
        key = account.dialect, account.model, account.status
        if (counter := self._requests.get(key)) is None:
            counter = self._meters["sakuradite_requests_total"].labels(*map(str, key))
            self._requests[key] = counter
        counter.inc()
        if account.code:
            self._meters["sakuradite_errors_total"].labels(account.dialect, account.model, account.code).inc()
        if account.dialect in DECIDING:
            kind = account.dialect, account.model
            if (histogram := self._seconds.get(kind)) is None:
                histogram = self._seconds[kind] = self._meters["sakuradite_request_seconds"].labels(*kind)
            histogram.observe(account.seconds)
        quiet = account.route in QUIET_ROUTES
        if access_log.isEnabledFor(logging.DEBUG if quiet else logging.INFO):
            self._lines.tell("debug" if quiet else "info", access_log.name, "request", _access(exchange))
        if (span := self._spans.pop(exchange, None)) is not None and self._tracing is not None:
            self._tracing.end(
                span,
                {
                    "http.request.method": exchange.method,
                    "http.route": account.route,
                    "http.response.status_code": account.status,
                    "error.type": account.code,
                    "sakuradite.request_id": exchange.id,
                    "sakuradite.dialect": account.dialect,
                    "sakuradite.model": account.model,
                    "sakuradite.questions": account.questions,
                    "sakuradite.images": account.images,
                    "sakuradite.input_tokens": account.input_tokens,
                },
                failed=account.status >= 500 or (account.status == 200 and account.code != ""),
            )


def _access(exchange: Exchange) -> dict[str, Any]:
    account = exchange.account
    fields: dict[str, Any] = {
        "request_id": exchange.id,
        "method": exchange.method,
        "route": account.route,
        "dialect": account.dialect,
        "status": account.status,
        "seconds": round(account.seconds, 6),
    }
    if account.code:
        fields["code"] = account.code
    if account.model:
        fields |= {
            "model": account.model,
            "questions": account.questions,
            "images": account.images,
            "stream": account.stream,
            "first_byte_seconds": round(account.first, 6),
            "input_tokens": account.input_tokens,
        }
    return fields


class ReplicaObserver:
    """Counts and tells of what one engine does. Counting is safe from both of its threads."""

    def __init__(self, meters: Meters, tracing: Tracing | None, lines: Lines, model: str) -> None:
        self._tracing, self._lines, self._model = tracing, lines, model

        def of_model(name: str) -> Any:
            return meters[name].labels(model)

        self._waited = of_model("sakuradite_queue_seconds")
        self._compile = of_model("sakuradite_compile_seconds_total")
        self._forward = of_model("sakuradite_forward_seconds")
        self._rows = of_model("sakuradite_batch_rows")
        self._prompt = of_model("sakuradite_prompt_tokens_total")
        self._computed = of_model("sakuradite_computed_tokens_total")
        self._padding = of_model("sakuradite_padding_tokens_total")
        self._saved = of_model("sakuradite_prefix_saved_tokens_total")
        self._halved = of_model("sakuradite_halved_batches_total")
        self._decision: Callable[[str], Any] = lambda code: meters["sakuradite_decisions_total"].labels(model, code)
        self._answered = self._decision("ok")

    def compiled(self, requests: int, seconds: float) -> None:
        self._compile.inc(seconds)

    def forwarded(self, batch: Batch) -> None:
        self._forward.observe(batch.seconds)
        self._rows.observe(batch.rows)
        self._prompt.inc(batch.prompt_tokens)
        self._computed.inc(batch.computed_tokens)
        self._padding.inc(batch.padding_tokens)
        self._saved.inc(batch.saved_tokens)

    def halved(self) -> None:
        self._halved.inc()

    def ended(self, request: RequestRecord, account: Account) -> None:
        if account.code:
            self._decision(account.code).inc()
        else:
            self._answered.inc()
        if (waited := account.waited) is not None:
            self._waited.observe(waited)
        if engine_log.isEnabledFor(logging.INFO):
            fields = {
                "request_id": request_id_of(request.id),
                "model": self._model,
                "questions": len(request.questions),
                "input_tokens": account.input_tokens,
                "batches": len(account.batches),
                "queue_seconds": None if waited is None else round(waited, 6),
                "forward_seconds": round(sum(batch.seconds for batch in account.batches), 6),
                "seconds": round(account.ended - account.admitted, 6),
            }
            if account.code:
                fields["code"] = account.code
            self._lines.tell("info", engine_log.name, "decision", fields)
        if self._tracing is not None:
            self._tracing.account(request.trace, self._model, account, request_id_of(request.id))
