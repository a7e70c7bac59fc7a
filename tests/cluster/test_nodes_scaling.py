"""Replicas that come and go with the load, and what is answered while there is none: over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sakuradite.cluster.scaling import by_pending_requests, model_scale
from sakuradite.config import ModelConfig, ReplicaRange
from tests.cluster.conftest import Daemon
from tests.cluster.processes import eventually

pytestmark = pytest.mark.ray


def replicas(daemon: Daemon, model: str) -> tuple[int, int]:
    """Wanted and ready."""
    status = daemon.status(model)
    assert status is not None
    return status["replicas"]["target"], status["replicas"]["ready"]


@pytest.fixture
def busy() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.mark.slow
def test_replicas_follow_the_load_between_their_bounds(daemon: Daemon, busy: ThreadPoolExecutor) -> None:
    model = "fake?latency=0.2"
    scale = {"min": 1, "max": 2, "target": 2, "up_after": 1, "down_after": 2}
    assert daemon.load(model=model, max_batch_size=1, replicas=scale)["status"] == "succeeded"
    assert replicas(daemon, model) == (1, 1)
    stopped: list[bool] = []

    def asking() -> set[int]:
        codes = set()
        while not stopped:
            codes.add(daemon.decide(model).status_code)
        return codes

    callers = [busy.submit(asking) for _ in range(8)]
    try:
        assert eventually(lambda: replicas(daemon, model) == (2, 2))
    finally:
        stopped.append(True)
    assert set().union(*(caller.result() for caller in callers)) == {200}
    assert eventually(lambda: replicas(daemon, model) == (1, 1))
    assert daemon.decide(model).status_code == 200
    daemon.unload(model)


@pytest.mark.slow
def test_a_model_that_was_scaled_to_zero_is_started_by_a_request(daemon: Daemon, busy: ThreadPoolExecutor) -> None:
    """With `wait` the request is held and answered; with `reject` it hears 503 at once, and a replica is started."""
    scale = {"min": 0, "max": 1, "up_after": 1, "down_after": 1}

    def load(cold_start: str) -> Any:
        model = f"fake-cold-{cold_start}"
        assert daemon.load(model=model, replicas=scale, cold_start=cold_start)["status"] == "succeeded"
        return daemon.decide(model).json()["answers"]

    assert len({str(expected := answers) for answers in busy.map(load, ("wait", "reject"))}) == 1
    for model in ("fake-cold-wait", "fake-cold-reject"):
        assert eventually(lambda: replicas(daemon, model) == (0, 0))  # noqa: B023
    assert daemon.client.get("/readyz").status_code == 200

    refused = daemon.decide("fake-cold-reject")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "replica_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    held = daemon.decide("fake-cold-wait")
    assert (held.status_code, held.json()["answers"]) == (200, expected)
    assert eventually(lambda: daemon.decide("fake-cold-reject").status_code == 200)
    for model in ("fake-cold-wait", "fake-cold-reject"):
        daemon.unload(model)


@pytest.mark.slow
def test_with_reject_nobody_needs_to_ask_again_for_a_replica_to_start(daemon: Daemon) -> None:
    scale = {"min": 0, "max": 1, "up_after": 1, "down_after": 4}
    assert daemon.load(model="fake-asked-once", replicas=scale, cold_start="reject")["status"] == "succeeded"
    assert eventually(lambda: replicas(daemon, "fake-asked-once") == (0, 0))
    assert daemon.decide("fake-asked-once").status_code == 503
    assert eventually(lambda: replicas(daemon, "fake-asked-once") == (1, 1))
    daemon.unload("fake-asked-once")


@pytest.mark.slow
def test_a_request_waits_for_a_cold_start_within_its_timeout(daemon: Daemon, busy: ThreadPoolExecutor) -> None:
    """And is not computed afterwards, when nobody waits for it any more; the replica comes up for the next ones."""
    model = "fake?load=8"
    scale = {"min": 0, "max": 1, "up_after": 1, "down_after": 6}
    assert daemon.load(model=model, replicas=scale, timeout=1)["status"] == "succeeded"
    assert eventually(lambda: replicas(daemon, model) == (0, 0))
    codes = busy.map(lambda _: daemon.decide(model).status_code, range(10))
    assert set(codes) == {504}
    assert eventually(lambda: replicas(daemon, model) == (1, 1))
    lines = daemon.client.get("/metrics").text.splitlines()
    ended = [line for line in lines if line.startswith("ray_sakuradite_decisions_total") and f'"{model}"' in line]
    assert ended
    assert sum(float(line.rpartition(" ")[2]) for line in ended) == 0
    assert daemon.decide(model).status_code == 200
    daemon.unload(model)


class Context:
    """What Serve tells a policy."""

    def __init__(self, current: int, pending: dict[str, float], queued: float) -> None:
        self.current_num_replicas, self.target_num_replicas = current, 3
        self.aggregated_metrics: dict[str, Any] = {"pending_requests": pending}
        self.total_queued_requests = queued
        self.config = type("Config", (), {"target_ongoing_requests": 10.0})


@pytest.mark.parametrize(
    ("context", "wanted"),
    [
        (Context(1, {"a": 25.0}, 0), 2.5),
        (Context(2, {"a": 25.0, "b": 5.0}, 10), 4.0),
        (Context(2, {}, 0), 0.0),
        (Context(0, {}, 5), 3),
    ],
)
def test_the_number_of_replicas_follows_from_requests_not_calls(context: Context, wanted: float) -> None:
    assert by_pending_requests(context) == (wanted, {})


def test_bounds_and_delays_are_serves() -> None:
    assert model_scale(3) == {"num_replicas": 3}
    scaled = model_scale(ReplicaRange(min=0, max=4, up_after=2, down_after=8))["autoscaling_config"]
    assert (scaled["min_replicas"], scaled["initial_replicas"], scaled["max_replicas"]) == (0, 1, 4)
    assert (scaled["upscale_delay_s"], scaled["downscale_delay_s"]) == (2, 8)
    assert scaled["metrics_interval_s"] < scaled["look_back_period_s"] == 2
    usual = model_scale(ReplicaRange(max=2))["autoscaling_config"]
    assert (usual["look_back_period_s"], usual["metrics_interval_s"]) == (30, 10)


@pytest.mark.parametrize("replicas", [0, {"min": 3, "max": 2}, {"min": -1, "max": 2}, {"max": 2, "target": 0}])
def test_bounds_that_cannot_be(replicas: object) -> None:
    with pytest.raises(ValueError, match="replicas"):
        ModelConfig.model_validate({"model": "m", "replicas": replicas})
