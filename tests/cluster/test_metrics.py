"""The figures of a real daemon under load, at /metrics and on Ray's own port: each one moves as it should.

The same daemon writes JSON logs and sends traces, so what is in them is looked at here too.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from sakuradite.cluster.metrics import METRICS
from tests.cluster.collector import Collector, attributes, collecting
from tests.cluster.conftest import Daemon, start_daemon
from tests.cluster.processes import descendants, eventually, listeners, name
from tests.cluster.scraping import Page
from tests.cluster.test_metrics_files import alerts, expressions
from tests.promql import Series, evaluate

pytestmark = pytest.mark.ray

CANARY = "tell-nobody-8842"
KEY = "key-that-nobody-may-see"
BUSY = "fake?latency=0.3&layout=padded&oom_rows=8"
STATE = "The customer was charged twice and wants a refund before Friday. " * 4
QUESTIONS = {f"q{i}": {"type": "choice", "criteria": {"a": None, "b": None}} for i in range(3)}
ERROR = 2
"""The status code of a failed span."""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Seen:
    """Pages of metrics in order, and what the tests need to judge them."""

    before: Page
    loaded: Page
    during: Page
    """At the height of the crowd."""
    done: Page
    """When it was answered; later its replica dies, and the counts of a process with it."""
    after: Page
    ray: Page
    saved: list[float]
    """Prefix tokens saved by the same state with one question, then with three."""
    state_tokens: int
    input_tokens: int
    """What the answers of the real model say that they read."""
    statuses: list[int]
    """Of the crowd of requests."""
    collector: Collector
    home: Path
    temporary: Path


def scrape(daemon: Daemon) -> Page:
    answer = daemon.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Page(answer.text)


def ray_page(daemon: Daemon) -> Page:
    """What the node's own metrics port shows, which is one of those that its agent listens on."""
    agents = {pid for pid in descendants(daemon.process.pid) if "DashboardAgent" in name(pid)}
    for _, loopback, port in listeners(agents):
        assert loopback
        with suppress(httpx.TransportError):  # the agent's other ports speak gRPC
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
            if "# TYPE ray_" in answer.text:
                return Page(answer.text)
    raise AssertionError("no metrics port")


def crowd(daemon: Daemon) -> tuple[Page, list[int]]:
    """Thirty at once for a model that takes 24, of different lengths; and what was seen meanwhile."""
    with ThreadPoolExecutor(30) as pool:
        waiting = [pool.submit(daemon.decide, BUSY, "x" * (1 + 30 * (i % 5))) for i in range(30)]
        seen = scrape(daemon)
        end = time.monotonic() + 20
        while time.monotonic() < end and not all(w.done() for w in waiting):
            page = scrape(daemon)
            seen = max(seen, page, key=lambda p: p.sum("queue_rows"))
            time.sleep(0.02)
        return seen, [w.result().status_code for w in waiting]


@pytest.fixture(scope="module")
def seen(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """One daemon, everything that can happen to it, and what was seen of it."""
    home, temporary = tmp_path_factory.mktemp("home"), Path(f"/tmp/m{os.getpid()}")
    temporary.mkdir()
    with collecting() as collector:
        daemon = start_daemon(
            home,
            environment={
                "TMPDIR": str(temporary),
                "RAY_enable_metrics_collection": "1",
                "RAY_metrics_report_interval_ms": "1000",
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "200",
                "SAKURADITE_LOG_FORMAT": "json",
            },
            admin_key=KEY,
        )
        daemon.client.headers["authorization"] = f"Bearer {KEY}"
        try:
            yield look(daemon, tiny("qwen3"), collector, home, temporary)
        finally:
            code, errors = daemon.stop()
            shutil.rmtree(temporary, ignore_errors=True)
        assert (code, errors) == (0, "")


def look(daemon: Daemon, checkpoint: Path, collector: Collector, home: Path, temporary: Path) -> Seen:
    before = scrape(daemon)
    loads = [
        daemon.admin("POST", "/models/load", json=config).json()["id"]
        for config in (
            {"backend": "fake", "model": BUSY, "max_pending_requests": 24, "num_cpus": 0},
            {"backend": "torch", "model": str(checkpoint), "num_cpus": 0},
            {"backend": "fake", "model": "fake?load_error=unsupported_model", "num_cpus": 0},
        )
    ]
    assert [daemon.wait(id_)["status"] for id_ in loads] == ["succeeded", "succeeded", "failed"]
    assert daemon.decide(BUSY).status_code == 200  # so that the crowd's answers are not the first: a rate needs two
    loaded = scrape(daemon)
    during, statuses = crowd(daemon)
    done = scrape(daemon)
    refuse(daemon)
    assert eventually(lambda: ray_page(daemon).sum("decisions_total", code="cancelled") == 1, 20)
    saved: list[float] = []
    input_tokens = 0
    for count in (1, 3):
        asked = dict(list(QUESTIONS.items())[:count])
        body = {"model": str(checkpoint), "state": STATE, "questions": asked}
        earlier = scrape(daemon)
        answer = daemon.client.post("/v1/decisions", json=body)
        assert answer.status_code == 200, answer.text
        input_tokens += answer.json()["usage"]["input_tokens"]
        saved.append(scrape(daemon).sum("prefix_saved_tokens_total") - earlier.sum("prefix_saved_tokens_total"))
    lose(daemon)
    assert eventually(lambda: at_rest(scrape(daemon)), 20)
    after = scrape(daemon)
    answered = after.sum("request_seconds_count")
    assert eventually(lambda: (page := ray_page(daemon)).sum("request_seconds_count") == answered and at_rest(page), 20)
    assert eventually(lambda: len([s for s in collector.spans() if s.name == "forward"]) > 5, 20)
    encoded = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(STATE, add_special_tokens=False)
    ray, length = ray_page(daemon), len(encoded.ids)
    return Seen(
        before, loaded, during, done, after, ray, saved, length, input_tokens, statuses, collector, home, temporary
    )


def at_rest(page: Page) -> bool:
    """Both replicas up and nothing on its way; the call to a replica ends just after the answers that it brought."""
    on_the_way = ("queue_requests", "requests_in_flight", "calls_in_flight")
    return page.sum("replica_ready") == 2 and all(page.sum(name) == 0 for name in on_the_way)


def refuse(daemon: Daemon) -> None:
    """What is answered with an error, in every dialect; and one whose caller does not wait."""
    client = daemon.client
    said = {"x-request-id": "mine-1", "traceparent": PARENT, "x-secret": CANARY}
    one = {"model": BUSY, "state": CANARY, "questions": {CANARY: {"type": "noul", "instructions": CANARY}}}
    assert client.post("/v1/decisions", headers=said, json=one).status_code == 200
    assert daemon.decide(f"unknown-{CANARY}").status_code == 404
    assert client.get(f"/{CANARY}?{CANARY}").status_code == 404
    wrong = client.post("/v1/decisions", headers={"authorization": f"Bearer {CANARY}"}, json={"model": CANARY, "x": 1})
    assert wrong.status_code == 422
    assert client.post("/v1/systemone", json=one).status_code == 200
    openai = {"model": BUSY, "input": CANARY, "questions": [{"type": "predicate", "instructions": CANARY}]}
    assert client.post("/v1/decisions", json=openai).status_code == 200
    image = f"data:image/png;base64,{CANARY}"
    assert client.post("/v1/decisions", json={**one, "images": [image]}).status_code == 422
    many = {f"q{i}": QUESTIONS["q0"] for i in range(96)}  # twelve forwards of 0.3 s, given up during the first ones
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/decisions", json={**one, "questions": many}, timeout=1)
    assert eventually(lambda: scrape(daemon).sum("decisions_total", code="cancelled") >= 1, 20)


def lose(daemon: Daemon) -> None:
    """Kill a replica that has a request; it is answered by the next one."""
    replicas = [p for p in descendants(daemon.process.pid) if "model-fake-latency" in name(p)]
    assert len(replicas) == 1
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(daemon.decide, BUSY)
        assert eventually(lambda: scrape(daemon).sum("queue_requests", model=BUSY) == 1, 20)
        os.kill(replicas[0], signal.SIGKILL)
        assert answer.result().status_code == 200


def grown(name: str, s: Seen) -> bool:
    return s.done.sum(name, model=BUSY) > s.before.sum(name, model=BUSY) == 0


def histogram(name: str, s: Seen, model: str = BUSY) -> bool:
    """Counts, sum and buckets agree with each other."""
    count = s.done.sum(f"{name}_count", model=model)
    every = s.done.sum(f"{name}_bucket", model=model, le="+Inf")
    return 0 < count == every and s.done.sum(f"{name}_sum", model=model) > 0


EXPECTED: dict[str, Callable[[str, Seen], bool]] = {
    "requests_total": lambda n, s: (
        s.after.sum(n, dialect="native", status="404") == 1
        and s.after.sum(n, dialect="native", status="422") == 2
        and s.after.sum(n, dialect="native", status="499") == 1
        and s.after.sum(n, dialect="native", status="429") == s.statuses.count(429) > 0
        and s.after.sum(n, dialect="native", model=BUSY, status="200") == s.statuses.count(200) + 3
        and s.after.sum(n, dialect="openai", status="200") == 1
        and s.after.sum(n, dialect="systemone", status="200") == 1
        and s.after.sum(n, dialect="other", status="404") == 1
        and s.after.sum(n, dialect="admin") > 3
    ),
    "errors_total": lambda n, s: (
        s.after.sum(n, code="model_not_found", model="") == 1
        and s.after.sum(n, code="capacity_exceeded", model=BUSY) == s.statuses.count(429)
        and s.after.sum(n, code="validation_error") == 2
        and s.after.sum(n, code="caller_gone") == 1
        and s.after.sum(n, code="not_found", dialect="other") == 1
    ),
    "request_seconds": lambda n, s: (
        s.after.sum(f"{n}_count", model=BUSY) > 20
        and s.after.sum(f"{n}_sum", model=BUSY) > 0.3 * s.statuses.count(200)
        and s.after.sum(f"{n}_bucket", model=BUSY, le="120.0") == s.after.sum(f"{n}_count", model=BUSY)
    ),
    "requests_in_flight": lambda n, s: s.during.sum(n) > 8 and s.after.sum(n) == 0,
    "request_bytes_in_flight": lambda n, s: s.during.sum(n) > 800 and s.after.sum(n) == 0,
    "calls_in_flight": lambda n, s: s.during.sum(n, model=BUSY) > 0 == s.after.sum(n),
    "retries_total": lambda n, s: s.after.sum(n, model=BUSY) == 1 and s.during.sum(n) == 0,
    "models": lambda n, s: (
        s.before.sum(n) == 0 and s.after.sum(n, state="ready") == 2 and s.after.sum(n, state="failed") == 1
    ),
    "replicas_wanted": lambda n, s: s.after.sum(n, model=BUSY) == 1 and s.after.sum(n) == 2,
    "operations_total": lambda n, s: (
        s.after.sum(n, kind="load", status="succeeded") == 2 and s.after.sum(n, kind="load", status="failed") == 1
    ),
    "replica_ready": lambda n, s: s.before.sum(n) == 0 and s.during.sum(n) == 2 == s.after.sum(n),
    "load_seconds": lambda n, s: s.after.sum(n, phase="load") > 0 and s.after.values(n, "phase") == {"resolve", "load"},
    "resident_bytes": lambda n, s: (
        s.during.sum(n, kind="weights") > 10_000 and s.during.sum(n, kind="process", model=BUSY) > 50_000_000
    ),
    "queue_requests": lambda n, s: 8 < s.during.sum(n, model=BUSY) <= 24 and s.after.sum(n) == 0,
    "queue_bytes": lambda n, s: s.during.sum(n, model=BUSY) > 8 and s.after.sum(n) == 0,
    "queue_rows": lambda n, s: 8 < s.during.sum(n, model=BUSY) <= 24 and s.after.sum(n) == 0,
    "queue_tokens": lambda n, s: s.during.sum(n, model=BUSY) > 8 * 100 and s.after.sum(n) == 0,
    "decisions_total": lambda n, s: (
        s.done.sum(n, code="capacity_exceeded") == s.statuses.count(429)
        and s.done.sum(n, code="ok", model=BUSY) == s.statuses.count(200) + 1
    ),
    "queue_seconds": histogram,
    "compile_seconds_total": grown,
    "forward_seconds": lambda n, s: (
        histogram(n, s) and s.done.sum(f"{n}_sum", model=BUSY) >= 0.3 * s.done.sum(f"{n}_count", model=BUSY)
    ),
    "batch_rows": lambda n, s: (
        histogram(n, s) and s.done.sum(f"{n}_sum") == s.statuses.count(200) + 1 > s.done.sum(f"{n}_count")
    ),
    "prompt_tokens_total": lambda n, s: s.after.sum(n) - s.after.sum(n, model=BUSY) == s.input_tokens,
    "computed_tokens_total": lambda n, s: (
        s.after.sum(n)
        == s.after.sum("prompt_tokens_total")
        + s.after.sum("padding_tokens_total")
        - s.after.sum("prefix_saved_tokens_total")
    ),
    "padding_tokens_total": lambda n, s: 0 < s.done.sum(n, model=BUSY) < s.done.sum("computed_tokens_total"),
    "prefix_saved_tokens_total": lambda n, s: (
        s.saved[1] - s.saved[0] >= 2 * s.state_tokens and s.saved[0] > 0 and s.after.sum(n, model=BUSY) == 0
    ),
    "halved_batches_total": grown,
}


@pytest.mark.parametrize("metric", [m.name.removeprefix("sakuradite_") for m in METRICS])
def test_a_metric_moves_as_it_should(metric: str, seen: Seen) -> None:
    lines = "\n".join(line for line in seen.after.text.splitlines() if f"_{metric}" in line and "_bucket" not in line)
    assert EXPECTED[metric](metric, seen), lines


def test_every_metric_is_on_the_page_with_its_type_and_labels(seen: Seen) -> None:
    for metric in METRICS:
        name = metric.name.removeprefix("sakuradite_")
        assert seen.after.types[name.removesuffix("_total")] == metric.kind
        series = f"{name}_count" if metric.kind == "histogram" else name
        assert seen.after.labels[series] == {*metric.labels, "replica"}, metric.name


def test_rays_own_port_shows_the_same(seen: Seen) -> None:
    """Counted by the same processes, to the last digit. Of the replica that was killed Ray keeps the counters."""
    assert seen.after.names() <= seen.ray.names()
    real = {"model": next(m for m in seen.after.values("load_seconds", "model") if m != BUSY)}
    for series, labels in (
        ("errors_total", {}),
        ("request_seconds_count", {}),
        ("request_seconds_sum", {"model": BUSY}),
        ("request_seconds_bucket", {"le": "1.0"}),
        ("operations_total", {}),
        ("replica_ready", {"model": BUSY}),
        ("forward_seconds_count", real),
        ("prompt_tokens_total", real),
    ):
        counted = seen.after.sum(series, **labels)
        assert seen.ray.sum(series, **labels) == pytest.approx(counted), series
        assert counted > 0, series
    cancelled = [page.sum("decisions_total", model=BUSY, code="cancelled") for page in (seen.after, seen.ray)]
    assert cancelled == [0, 1]


@pytest.mark.parametrize(("panel", "expression"), expressions(), ids=lambda text: text if "(" not in text else "")
def test_a_panel_of_the_dashboard_shows_what_was_seen(panel: str, expression: str, seen: Seen) -> None:
    series = Series([(0, seen.before), (5, seen.loaded), (10, seen.during), (20, seen.done)])
    values = evaluate(expression, series, 20)
    shown = [value for value in values.values() if not math.isnan(value)]  # of a model that nobody asked
    assert shown, expression
    assert min(shown) >= 0, (expression, values)


def test_the_alerts_see_what_was_seen(seen: Seen) -> None:
    """Requests were turned away, batches did not fit, a model failed; nothing else was wrong."""
    series = Series([(0, seen.before), (5, seen.loaded), (10, seen.during), (20, seen.done)])
    firing = {alert for alert, expression in alerts() if evaluate(expression, series, 20)}
    assert firing == {"SakuraditeQueueFull", "SakuraditeDeviceTooSmall", "SakuraditeModelFailed"}
    assert {alert for alert, expression in alerts() if evaluate(expression, series, 0)} == {"SakuraditeNoModelReady"}
    assert "SakuraditeNotSeen" in {alert for alert, expression in alerts() if evaluate(expression, Series(), 0)}


def test_labels_are_bounded(seen: Seen) -> None:
    """A name that somebody sent is never a label: only those of resident models are."""
    assert seen.after.values("requests_total", "model") == {"", BUSY, *seen.after.values("load_seconds", "model")}
    assert CANARY not in seen.after.text
    assert CANARY not in seen.ray.text


# -- logs


def lines(seen: Seen, process: str) -> list[dict[str, Any]]:
    files = sorted((seen.home / "logs").glob(f"{process}-*.log"))
    assert files
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_request_has_a_line_at_the_router_and_one_at_the_replica(seen: Seen) -> None:
    (router,) = [line for line in lines(seen, "router") if line.get("request_id") == "mine-1"]
    (model,) = [line for line in lines(seen, "model") if line.get("request_id") == "mine-1"]
    assert {k: router[k] for k in ("level", "process", "message", "method", "route", "dialect", "status", "model")} == {
        "level": "info", "process": "router", "message": "request", "method": "POST", "route": "/v1/decisions",
        "dialect": "native", "status": 200, "model": BUSY,
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", router["time"])
    assert (model["process"], model["message"], model["model"], model["questions"]) == ("model", "decision", BUSY, 1)
    assert router["input_tokens"] == model["input_tokens"] > 0
    assert router["seconds"] >= model["seconds"] >= model["forward_seconds"] >= 0.3
    assert model["queue_seconds"] >= 0


def test_what_failed_says_its_code(seen: Seen) -> None:
    codes = {line["code"]: line for line in lines(seen, "router") if "code" in line}
    assert {"model_not_found", "capacity_exceeded", "validation_error", "caller_gone", "not_found"} <= set(codes)
    assert codes["caller_gone"]["status"] == 499
    assert codes["not_found"]["route"] == "-"
    assert {line["code"] for line in lines(seen, "model") if "code" in line} >= {"capacity_exceeded", "cancelled"}
    failed = [line for line in lines(seen, "catalog") if line.get("code")]
    assert [(line["kind"], line["code"]) for line in failed] == [("load", "unsupported_model")]


def test_nothing_of_a_request_is_in_any_file_of_the_run(seen: Seen) -> None:
    """Ray's own logs too, the catalog's files, and what was sent to the collector."""
    looked = 0
    for folder in (seen.home, seen.temporary):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                looked += 1
                assert CANARY.encode() not in data, path
                assert KEY.encode() not in data, path
    assert looked > 20
    sent = b"".join(seen.collector.bodies)
    assert b"mine-1" in sent
    assert CANARY.encode() not in sent
    assert KEY.encode() not in sent


# -- traces


def test_a_trace_goes_from_the_callers_span_to_the_forward(seen: Seen) -> None:
    trace = [(sender, s) for sender, s in seen.collector.spans_by_service() if s.trace_id.hex() == PARENT.split("-")[1]]
    spans = {span.name: span for _, span in trace}
    assert set(spans) == {"POST /v1/decisions", "model", "compile", "queue", "forward"}
    server, model = spans["POST /v1/decisions"], spans["model"]
    assert server.parent_span_id.hex() == PARENT.split("-")[2]
    assert model.parent_span_id == server.span_id
    assert {spans[part].parent_span_id for part in ("compile", "queue", "forward")} == {model.span_id}
    ends = [model.start_time_unix_nano]
    for part in ("compile", "queue", "forward"):
        assert ends[-1] <= spans[part].start_time_unix_nano <= spans[part].end_time_unix_nano
        ends.append(spans[part].end_time_unix_nano)
    assert ends[-1] <= model.end_time_unix_nano
    assert spans["forward"].end_time_unix_nano - spans["forward"].start_time_unix_nano >= 3e8
    assert attributes(server) == {
        "http.request.method": "POST", "http.route": "/v1/decisions", "http.response.status_code": 200,
        "sakuradite.request_id": "mine-1", "sakuradite.dialect": "native", "sakuradite.model": BUSY,
        "sakuradite.questions": 1, "sakuradite.images": 0,
        "sakuradite.input_tokens": attributes(model)["sakuradite.input_tokens"],
    }  # fmt: skip
    assert attributes(spans["forward"])["sakuradite.batch.rows"] == 1
    assert seen.collector.paths == {"/v1/traces"}
    assert {sender["service.name"] for sender, _ in trace} == {"sakuradite"}
    assert {sender["service.instance.id"].partition("-")[0] for sender, _ in trace} == {"router", "model"}


def test_what_fails_is_marked(seen: Seen) -> None:
    models = [span for span in seen.collector.spans() if span.name == "model"]
    failed = {attributes(span)["error.type"] for span in models if span.status.code == ERROR}
    assert {"capacity_exceeded", "cancelled"} <= failed
    assert not [span for span in models if "error.type" in attributes(span) and span.status.code != ERROR]


def test_curl_is_all_it_takes(daemon: Daemon) -> None:
    """On a daemon without a key, as the documentation has it."""
    page = subprocess.run(["curl", "-sf", f"{daemon.url}/metrics"], capture_output=True, text=True, check=True).stdout
    assert Page(page).types.keys() == {m.name.removeprefix("sakuradite_").removesuffix("_total") for m in METRICS}
