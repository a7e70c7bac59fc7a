"""A head node that restarts, its GCS on a disk: what a head pod does with `gcsFaultToleranceOptions`."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.cluster.processes import descendants, eventually
from tests.deployments.conftest import ADMIN_KEY, API_KEY, QUESTIONS, Head, start_head
from tests.deployments.test_deploying import CONFIG, load

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def ask(head: Head, model: str, answers: list[object] | None = None) -> int:
    """The status of one decision over a connection of its own; 0 where none came, as at the proxy that has died.

    `answers` gets what it says.
    """
    body = {"model": model, "state": "x", "questions": QUESTIONS}
    try:
        reply = httpx.post(f"{head.client.base_url}/v1/decisions", json=body, headers=head.client.headers, timeout=30,
                           trust_env=False)  # fmt: skip
    except httpx.TransportError:
        return 0
    if answers is not None and reply.status_code == 200:
        answers.append(reply.json()["answers"])
    return reply.status_code


def test_a_worker_decides_while_the_head_is_away_and_the_catalog_finds_its_books(tmp_path: Path) -> None:
    storage = tmp_path / "gcs"
    storage.mkdir()
    environment = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(storage),
                   "SAKURADITE_API_KEY": API_KEY, "SAKURADITE_ADMIN_KEY": ADMIN_KEY}  # fmt: skip
    with start_head(tmp_path / "home", cpus=0, **environment) as head:
        head.add_worker(cpus=4)
        config = copy.deepcopy(head.here(CONFIG)) | {"proxy_location": "EveryNode"}
        config["applications"][0]["args"]["num_cpus"] = 0.1  # on the worker, as in the manifests
        assert eventually(lambda: head.put(config).status_code == 200, 30)
        assert eventually(lambda: ask(head, "fake") == 200, 90), head.details()
        load(head, "loaded")

        answers: list[object] = []
        ask(head, "fake", answers)
        (first,) = [process for process in head.started if "--head" in process.args]  # type: ignore[operator]
        for pid in descendants(first.pid) | {first.pid}:
            os.kill(pid, signal.SIGKILL)
        first.wait()
        killed = time.monotonic()
        codes, times = [], []
        while time.monotonic() < killed + 10:
            for model in ("fake", "loaded"):
                begun = time.monotonic()
                codes.append(ask(head, model, answers))
                times.append((time.monotonic() - begun, codes[-1], begun - killed))
        print("without a head:", {code: codes.count(code) for code in sorted(set(codes))})
        print("the worst (seconds, status, seconds after the kill):", sorted(times)[-3:])
        assert codes.count(200) > 10
        assert set(codes[10:]) == {200}, codes
        assert all(answer == answers[0] for answer in answers), "the fake model answers alike, by whatever name"

        head.start()
        back = time.monotonic()
        assert eventually(lambda: head.admin.get("/admin/v1/models").status_code == 200, 90)
        print(f"administration is back {time.monotonic() - back:.1f} s after the head")
        assert {m["model"]: m["status"] for m in head.admin.get("/admin/v1/models").json()} == {
            "loaded": "ready", "fake": "ready",
        }  # fmt: skip
        assert ask(head, "fake") == ask(head, "loaded") == 200
        assert head.admin.post("/admin/v1/models/unload", json={"model": "loaded"}).status_code == 200
        assert eventually(lambda: ask(head, "loaded") == 404, 30)
        load(head, "again")
        assert ask(head, "again") == 200
