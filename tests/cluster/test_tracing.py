"""Traces without a cluster: when they are wanted, what is said where they cannot be had, what the spans look like."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from sakuradite.cluster import tracing
from sakuradite.engine.observing import Account, Batch
from sakuradite.errors import ConfigurationError, MissingExtraError
from tests.cluster.collector import Collector, attributes, collecting


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*tracing.ENDPOINTS, *tracing.PROTOCOLS, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        yield collector


def test_only_where_the_environment_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tracing.wanted()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert tracing.wanted()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not tracing.wanted()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not tracing.wanted()


def test_missing_packages_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto", None)
    tracing.check()  # nothing is wanted, so nothing is missing
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    with pytest.raises(MissingExtraError) as raised:
        tracing.check()
    assert str(raised.value) == (
        "OTEL_EXPORTER_OTLP_ENDPOINT asks for traces: OpenTelemetry needs the extra [otel]: "
        "pip install 'sakuradite[otel]'"
    )


@pytest.mark.parametrize("name", tracing.PROTOCOLS)
def test_another_protocol_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv(name, "grpc")
    with pytest.raises(ConfigurationError, match=rf"{name}=grpc: .*4318"):
        tracing.check()


def test_the_one_for_traces_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    tracing.check()


def account() -> Account:
    batches = [Batch(2.0, 3, 30, 24, 4, 0.5), Batch(3.0, 1, 10, 10, 0, 0.25)]
    return Account(1.0, 1.25, 1.5, 40, batches, 4.0)


def test_a_request_without_a_router_is_a_trace_of_its_own(collector: Collector) -> None:
    traces = tracing.Tracing("model")
    traces.account("", "m", account(), "r-1")
    traces.close()
    spans = {(s.name, s.start_time_unix_nano): s for s in collector.spans()}
    (model,) = [s for s in spans.values() if s.name == "model"]
    assert not model.parent_span_id
    assert attributes(model) == {"sakuradite.model": "m", "sakuradite.request_id": "r-1", "sakuradite.input_tokens": 40}
    begun = model.start_time_unix_nano
    times = {
        s.name: [(s.start_time_unix_nano - begun) / 1e9, (s.end_time_unix_nano - begun) / 1e9]
        for s in spans.values() if s.name != "forward"
    }  # fmt: skip
    assert {name: pytest.approx(time, abs=1e-6) for name, time in times.items()} == {
        "model": [0.0, 3.0], "compile": [0.25, 0.5], "queue": [0.5, 1.0],
    }  # fmt: skip
    assert [attributes(s)["sakuradite.batch.rows"] for s in spans.values() if s.name == "forward"] == [3, 1]


def test_a_caller_that_does_not_sample_is_left_alone(collector: Collector) -> None:
    traces = tracing.Tracing("router")
    span = traces.serve("POST /v1/decisions", {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00"})
    assert traces.parent_of(span).endswith("-00")
    traces.end(span, {}, failed=False)
    traces.account(traces.parent_of(span), "m", account(), "r-1")
    traces.close()
    assert collector.bodies == []
