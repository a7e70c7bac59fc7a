"""The daemon as a user meets it: load, ps, run, unload, and everything that is refused."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import SERVE, Daemon, run_python
from tests.cluster.processes import alive, descendants, eventually, listeners, name

pytestmark = pytest.mark.ray


def replicas(daemon: Daemon, deployment: str) -> list[int]:
    """The processes of `Replica:application:deployment` (or its beginning), or of the `Controller`."""
    return [p for p in descendants(daemon.process.pid) if name(p).startswith(f"ray::Serve{deployment}")]


def test_load_ps_run_unload(daemon: Daemon) -> None:
    assert daemon.decide("fake-life").status_code == 404
    operation = daemon.load(model="fake-life")
    assert operation["status"] == "succeeded"
    assert operation["progress"]["phase"] == "done"
    answer = daemon.decide("fake-life")
    assert answer.status_code == 200
    assert answer.json()["model"] == "fake-life"
    status = daemon.status("fake-life")
    assert status is not None
    assert (status["status"], status["replicas"]) == ("ready", {"target": 1, "ready": 1})
    assert status["operation_id"] == operation["id"]
    assert status["capabilities"]["backend"] == "fake"
    process = [p for p in descendants(daemon.process.pid) if "model-fake-life" in name(p)]
    assert len(process) == 1
    unloaded = daemon.unload("fake-life")
    assert (unloaded.status_code, unloaded.json()["status"]) == (200, "unloaded")
    assert eventually(lambda: not alive(set(process)))  # so its memory is back, all of it
    assert daemon.decide("fake-life").status_code == 404
    assert daemon.unload("fake-life").status_code == 404
    assert daemon.load(model="fake-life")["id"] != operation["id"]
    assert daemon.decide("fake-life").json()["answers"] == answer.json()["answers"]
    daemon.unload("fake-life")


def test_the_same_configuration_is_the_same_operation_and_another_a_conflict(daemon: Daemon) -> None:
    first = daemon.load(model="fake-same", max_batch_size=4)
    assert daemon.load(model="fake-same", max_batch_size=4)["id"] == first["id"]
    assert daemon.load(model="fake-same", max_batch_size=4, device="cpu", dtype="float32")["id"] == first["id"]
    for other in ({"max_batch_size": 8}, {"max_batch_size": 4, "dtype": "bfloat16"}):
        refused = daemon.admin("POST", "/models/load", json={"model": "fake-same", "backend": "fake", **other})
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "invalid_lifecycle"
        assert next(reversed(other)) in refused.json()["error"]["message"]
    daemon.unload("fake-same")


@pytest.mark.parametrize(
    ("config", "code", "status"),
    [
        ({"model": "fake?load_error=unsupported_model"}, "unsupported_model", 422),
        ({"model": "fake?load_error=model_load_failed"}, "model_load_failed", 503),
        ({"model": "fake?load_error=insufficient_resources"}, "insufficient_resources", 422),
        ({"model": "fake?nonsense=1"}, "configuration_error", 400),
        ({"model": "/nowhere/at/all", "backend": "torch"}, "model_not_found", 404),
        ({"model": "no-such-owner/no-such-model", "backend": "torch", "offline": True}, "offline_missing", 409),
    ],
)
def test_a_failed_load_keeps_its_code_after_one_attempt(
    config: dict[str, object], code: str, status: int, daemon: Daemon
) -> None:
    operation = daemon.load(**config)
    assert operation["status"] == "failed"
    assert (operation["error"]["code"], operation["error"]["status_code"]) == (code, status)
    model = str(config["model"])
    shown = daemon.status(model)
    assert shown is not None
    assert shown["status"] == "failed"
    assert shown["last_error"] == operation["error"]
    assert not [p for p in descendants(daemon.process.pid) if "ServeReplica:model-" in name(p)]
    assert daemon.decide(model).status_code == 404
    assert daemon.unload(model).status_code == 200  # which forgets it
    assert daemon.status(model) is None


def test_a_replica_that_cannot_start_is_one_failed_load(daemon: Daemon, tmp_path: Path) -> None:
    """A process that dies in its constructor leaves no data behind, only Serve's word for it."""
    operation = daemon.load(model="fake?crash=parcel")  # the text of the probe
    assert (operation["status"], operation["error"]["code"]) == ("failed", "model_load_failed")
    daemon.unload("fake?crash=parcel")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"backend": "torch", "device": "cuda"}, "1 GPU"),
        ({"num_gpus": 0.5, "device": "cuda", "backend": "torch"}, "0.5 GPU"),
        ({"num_cpus": 100_000}, "100000 CPU"),
        ({"memory": 1 << 50}, "1048576.0 GiB memory"),
        ({"resources": {"TPU": 1}}, "1 TPU"),
        ({"placement": {"zone": "nowhere"}}, "no such node"),
        ({"replicas": 100}, "100 x"),
    ],
)
def test_what_the_cluster_cannot_give_is_said_at_once(
    config: dict[str, object], words: str, daemon: Daemon, tiny: Callable[..., Path]
) -> None:
    model = str(tiny("llama")) if config.get("backend") == "torch" else "fake-large"
    operation = daemon.load(model=model, **config)
    assert operation["error"]["code"] == "insufficient_resources", operation
    assert words in operation["error"]["message"]
    assert "needed" in operation["error"]["message"]
    daemon.unload(model)


def test_of_loads_at_once_one_is_told_that_nothing_is_left(daemon: Daemon) -> None:
    """The first one's replicas are not scheduled yet when the second looks: both would wait, one of them for ever."""
    cpus = os.cpu_count() or 1
    bodies = [{"model": f"fake-{n}", "backend": "fake", "num_cpus": cpus, "replicas": 1} for n in ("one", "two")]
    started = [daemon.admin("POST", "/models/load", json=body).json()["id"] for body in bodies]
    first, second = (daemon.wait(operation) for operation in started)
    assert first["status"] == "succeeded"
    assert second["error"]["code"] == "insufficient_resources"
    assert "available 127.0.0.1 0 CPU" in second["error"]["message"]
    for body in bodies:
        assert daemon.unload(str(body["model"])).status_code == 200


def test_an_unload_cancels_a_load(daemon: Daemon) -> None:
    response = daemon.admin("POST", "/models/load", json={"model": "fake?load=100", "backend": "fake"})
    operation = response.json()["id"]
    loading = daemon.decide("fake?load=100")
    assert (loading.status_code, loading.json()["error"]["code"]) == (503, "model_loading")
    assert "retry-after" in loading.headers
    assert daemon.unload("fake?load=100").json()["status"] == "unloaded"
    ended = daemon.wait(operation)
    assert (ended["status"], ended["error"]["code"]) == ("cancelled", "cancelled")
    assert daemon.status("fake?load=100") is None
    assert eventually(lambda: not [p for p in descendants(daemon.process.pid) if "model-fake" in name(p)])


def test_unloading_drains_what_runs(daemon: Daemon) -> None:
    daemon.load(model="fake?latency=1.5")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(daemon.decide, "fake?latency=1.5")
        assert eventually(lambda: not running.done())
        threading.Event().wait(0.3)  # for it to have reached the model
        assert daemon.unload("fake?latency=1.5").json()["status"] == "unloaded"
        assert running.result().status_code == 200


def test_overload_is_429_and_health_stays_green(daemon: Daemon) -> None:
    """Case 58: 500 requests at a queue of 16."""
    daemon.load(model="fake?latency=0.05", max_pending_requests=16)
    limits = httpx.Limits(max_connections=100)
    with (
        httpx.Client(base_url=daemon.url, trust_env=False, timeout=60, limits=limits) as client,
        ThreadPoolExecutor(100) as pool,
    ):
        body = {"model": "fake?latency=0.05", "state": "x", "questions": {"q": {"type": "noul", "instructions": "y"}}}
        answers = list(pool.map(lambda _: client.post("/v1/decisions", json=body), range(500)))
        assert client.get("/healthz").status_code == 200
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 429}
    assert all("retry-after" in a.headers for a in answers if a.status_code == 429)
    daemon.unload("fake?latency=0.05")


def test_aliases(daemon: Daemon) -> None:
    daemon.load(model="fake-alias")
    assert daemon.admin("PUT", "/aliases/mine", json={"model": "fake-alias"}).status_code == 200
    assert daemon.decide("mine").json()["model"] == "fake-alias"
    assert daemon.admin("PUT", "/aliases/mine", json={"model": "fake-nobody"}).status_code == 404
    assert daemon.admin("PUT", "/aliases/default", json={"model": "fake-alias"}).status_code == 200
    assert daemon.decide("jev-latest").json()["model"] == "fake-alias"
    names = [m["name"] for m in daemon.client.get("/v1/models").json()["models"]]
    assert {"fake-alias", "mine", "jev-latest"} <= set(names)
    for alias in ("mine", "default"):
        assert daemon.admin("DELETE", f"/aliases/{alias}").status_code == 200
    assert daemon.decide("mine").status_code == 404
    assert daemon.admin("DELETE", "/aliases/mine").status_code == 404
    daemon.unload("fake-alias")


def test_a_real_checkpoint(daemon: Daemon, tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    operation = daemon.load(model=f"{folder}/", backend="torch", device="cpu", dtype="float32")
    assert operation["status"] == "succeeded", operation
    assert daemon.decide(str(folder)).status_code == 200
    shown = daemon.status(str(folder))
    assert shown is not None
    assert shown["storage"] == {
        "managed": False, "path": str(folder), "bytes": None, "revision": None, "complete": True,
    }  # fmt: skip
    assert daemon.admin("DELETE", "/models", params={"model": str(folder)}).status_code == 409
    daemon.unload(str(folder))
    assert folder.is_dir()


def test_only_loopback(daemon: Daemon) -> None:
    own = descendants(daemon.process.pid)
    port = int(daemon.url.rsplit(":", 1)[1])
    assert [(loopback, "Router" in name(pid)) for pid, loopback, p in listeners(own) if p == port] == [(True, True)]
    assert all(name(p).startswith("ray::ServeReplica:") for p, loopback, _ in listeners(own) if not loopback)


def test_a_second_daemon_of_the_home_says_what_differs(daemon: Daemon, tmp_path: Path) -> None:
    """Case 52."""
    port = int(daemon.url.rsplit(":", 1)[1])
    for settings, words in (
        ({"home": str(tmp_path), "port": port}, "--port takes another"),
        ({"home": str(home_of(daemon)), "port": port + 1}, f"with port {port} instead of {port + 1}"),
    ):
        process = run_python(SERVE, repr(settings))
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, "")
        assert len(errors.splitlines()) == 1, errors
        assert words in errors


def home_of(daemon: Daemon) -> Path:
    """The home of a daemon, from the file that it keeps locked."""
    links = [os.readlink(f"/proc/{daemon.process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{daemon.process.pid}/fd")]
    (lock,) = [link for link in links if link.endswith("daemon.lock")]
    return Path(lock).parent


def test_restarts_keep_the_books(daemons: Callable[..., Daemon]) -> None:
    """A daemon that is killed, one that restores, one that is stopped while it loads."""
    first = daemons()
    done = first.load(model="fake-kept", max_batch_size=3)
    first.admin("PUT", "/aliases/mine", json={"model": "fake-kept"})
    cut = first.admin("POST", "/models/load", json={"model": "fake?load=100", "backend": "fake"}).json()["id"]
    left = descendants(first.process.pid)
    first.stop(signal.SIGKILL)
    assert eventually(lambda: not alive(left), 90)

    second = daemons(restore=True)
    kept = {o["id"]: o for o in second.admin("GET", "/operations").json()}
    assert kept[done["id"]]["status"] == "succeeded"
    assert (kept[cut]["status"], kept[cut]["error"]["code"]) == ("failed", "interrupted")
    restored = second.status("fake-kept")
    assert restored is not None
    assert second.wait(restored["operation_id"])["status"] == "succeeded"
    assert restored["config"]["max_batch_size"] == 3
    assert second.decide("mine").json()["model"] == "fake-kept"
    interrupted = second.status("fake?load=100")
    assert interrupted is not None
    assert (interrupted["status"], interrupted["last_error"]["code"]) == ("failed", "interrupted")
    second.admin("POST", "/models/load", json={"model": "fake?load=99", "backend": "fake"})
    left = descendants(second.process.pid)
    assert second.stop(signal.SIGINT) == (0, "")
    assert alive(left) == set()
    assert [line.split()[0] for line in second.lines] == ["Starting", "Sakuradite", "Restoring", "Stopping;"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "deployment", ["Replica:sakuradite:Catalog", "Replica:sakuradite:Router", "Replica:model-fake-hard", "Controller"]
)
def test_a_killed_process_loses_nothing(deployment: str, daemon: Daemon) -> None:
    done = daemon.load(model="fake-hard")
    slow = daemon.admin("POST", "/models/load", json={"model": "fake?load=8", "backend": "fake"}).json()["id"]
    before = {o["id"] for o in daemon.admin("GET", "/operations").json()}
    (pid,) = replicas(daemon, deployment)
    others = {p for p in replicas(daemon, "Replica:") if p != pid}
    os.kill(pid, signal.SIGKILL)

    def answered() -> bool:
        try:
            return daemon.decide("fake-hard").status_code == 200
        except httpx.TransportError:
            return False  # the router itself was killed

    assert eventually(answered)
    assert eventually(lambda: len(replicas(daemon, deployment)) == 1 and replicas(daemon, deployment) != [pid])
    assert others <= set(replicas(daemon, "Replica:"))  # nobody else was thrown away with it
    ended = daemon.wait(slow)
    assert ended["status"] == "succeeded", ended
    assert daemon.decide("fake?load=8").status_code == 200
    assert {o["id"] for o in daemon.admin("GET", "/operations").json()} == before
    shown = daemon.status("fake-hard")
    assert shown is not None
    assert shown["operation_id"] == done["id"]
    for model in ("fake-hard", "fake?load=8"):
        assert daemon.unload(model).status_code == 200
