"""A daemon and the hub: pull, inspect, load, decide, unload and remove over HTTP, and how a download can fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Daemon, run_python, start_daemon
from tests.hub.conftest import checkpoint
from tests.hub.standin import StandIn

pytestmark = pytest.mark.ray

TINY = "org/tiny"


@pytest.fixture(scope="module")
def hub() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()


@pytest.fixture(scope="module")
def served(hub: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose hub is the stand-in, without a login."""
    folder = tmp_path_factory.mktemp("hub")
    environment: dict[str, str | None] = {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": None, "HF_HUB_OFFLINE": None, "TRANSFORMERS_OFFLINE": None,
    }  # fmt: skip
    running = start_daemon(folder / "home", environment=environment)
    yield running
    running.stop()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_pull_inspect_load_decide_unload_remove(served: Daemon, hub: StandIn, tiny: Callable[..., Path]) -> None:
    commit = hub.add(TINY, files_of(tiny("llama")))
    described = served.admin("POST", "/models/inspect", json={"model": TINY}).json()
    assert (described["revision"], described["model_type"]) == (commit, "llama")
    assert described["backends"]["torch"]["supported"]
    assert served.status(TINY) is None

    response = served.admin("POST", "/models/pull", json={"model": TINY})
    assert response.status_code == 202
    pulled = served.wait(response.json()["id"])
    assert (pulled["status"], pulled["result"]) == ("succeeded", {"model": TINY, "revision": commit})
    assert pulled["progress"]["bytes_done"] == pulled["progress"]["bytes_total"] > 0
    status = served.status(TINY)
    assert status is not None
    storage = status["storage"]
    assert (status["status"], storage["complete"], storage["revision"]) == ("unloaded", True, commit)

    hub.seen.clear()
    loaded = served.load(model=TINY, backend="torch", device="cpu")
    assert loaded["status"] == "succeeded", loaded
    assert hub.seen == [], "what is stored is loaded without asking the hub"
    status = served.status(TINY)
    assert status is not None
    assert status["status"] == "ready"
    assert status["storage"]["managed"]
    answer = served.decide(TINY)
    assert answer.status_code == 200
    assert sum(answer.json()["answers"]["q"]["probabilities"].values()) == pytest.approx(1.0, abs=1e-6)

    refused = served.admin("DELETE", "/models", params={"model": TINY})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "invalid_lifecycle")
    assert served.unload(TINY).json()["status"] == "unloaded"
    removed = served.admin("DELETE", "/models", params={"model": TINY})
    assert (removed.status_code, removed.json()) == (200, {"model": TINY, "status": "removed"})
    assert served.status(TINY) is None
    again = served.admin("DELETE", "/models", params={"model": TINY})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("kind", ["pull", "load"])
@pytest.mark.parametrize(
    ("model", "files", "options", "code", "status_code"),
    [
        ("org/missing", None, {}, "model_not_found", 404),
        ("org/gated", checkpoint(), {"gated": True}, "model_access_denied", 403),
        ("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"}, {}, "unsupported_model", 422),
    ],
    ids=["missing", "gated", "pickled"],
)
def test_a_download_that_fails_has_its_own_code(
    served: Daemon,
    hub: StandIn,
    kind: str,
    model: str,
    files: dict[str, bytes] | None,
    options: dict[str, Any],
    code: str,
    status_code: int,
) -> None:
    if files is not None:
        hub.add(model, files, **options)
    body = {"model": model} | ({"backend": "torch"} if kind == "load" else {})
    response = served.admin("POST", f"/models/{kind}", json=body)
    assert response.status_code == 202
    operation = served.wait(response.json()["id"])
    assert operation["status"] == "failed"
    assert (operation["error"]["code"], operation["error"]["status_code"]) == (code, status_code)
    inspected = served.admin("POST", "/models/inspect", json={"model": model})
    if code == "unsupported_model":
        assert not inspected.json()["backends"]["torch"]["supported"]
    else:
        assert (inspected.status_code, inspected.json()["error"]["code"]) == (status_code, code)
    if kind == "load":
        status = served.status(model)
        assert status is not None
        assert (status["status"], status["last_error"]["code"]) == ("failed", code)


@pytest.mark.parametrize(
    ("model", "code", "status_code", "says"),
    [
        ("/no/such/checkpoint", "model_not_found", 404, "looks like a path"),
        ("./no-such", "model_not_found", 404, "looks like a path"),
        ("no spaces allowed", "validation_error", 422, "is no hub id"),
    ],
)
@pytest.mark.parametrize("kind", ["pull", "load", "inspect"])
def test_a_name_that_leads_nowhere(
    served: Daemon, hub: StandIn, kind: str, model: str, code: str, status_code: int, says: str
) -> None:
    hub.seen.clear()
    response = served.admin("POST", f"/models/{kind}", json={"model": model})
    if kind == "inspect":
        error = response.json()["error"] | {"status_code": response.status_code}
    else:
        error = served.wait(response.json()["id"])["error"]
    assert (error["code"], error["status_code"]) == (code, status_code)
    assert says in error["message"]
    assert hub.seen == []


def test_a_load_that_is_cancelled_while_it_downloads(served: Daemon, hub: StandIn, tiny: Callable[..., Path]) -> None:
    hub.add("org/slow", files_of(tiny("llama")))
    go = threading.Event()
    hub.before_send = lambda name: None if name != "model.safetensors" else (go.wait(60), None)[1]
    operation = served.admin("POST", "/models/load", json={"model": "org/slow", "backend": "torch"}).json()["id"]
    end = time.monotonic() + 60
    while not hub.downloads("model.safetensors"):
        assert time.monotonic() < end
        time.sleep(0.05)
    status = served.status("org/slow")
    assert status is not None
    assert (status["status"], status["operation_id"]) == ("loading", operation)
    progress = served.admin("GET", f"/operations/{operation}").json()["progress"]
    assert progress["phase"] == "downloading"
    assert progress["bytes_done"] < progress["bytes_total"]
    assert served.unload("org/slow").status_code == 200
    ended = served.wait(operation)
    assert (ended["status"], ended["error"]["code"], ended["error"]["status_code"]) == ("cancelled", "cancelled", 409)
    hub.before_send = lambda name: None
    go.set()
    again = served.wait(served.admin("POST", "/models/pull", json={"model": "org/slow"}).json()["id"])
    assert again["status"] == "succeeded"


EMBEDDED = """
import sys
from pathlib import Path
from sakuradite import Choice, Sakuradite
if __name__ == "__main__":
    with Sakuradite("org/embedded", backend="torch", device="cpu", home=Path(sys.argv[1])) as client:
        result = client.decide(state="x", questions={"q": Choice(criteria={"a": None, "b": None})})
    print(sorted(result.choices["q"].probabilities))
"""


@pytest.mark.slow
def test_an_embedded_client_downloads_on_first_use(hub: StandIn, tiny: Callable[..., Path], tmp_path: Path) -> None:
    commit = hub.add("org/embedded", files_of(tiny("llama")), private=True, readers={"hf_reader"})
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    for offline in (None, "1"):
        hub.seen.clear()
        process = run_python(
            EMBEDDED,
            str(tmp_path / "home"),
            HF_TOKEN="hf_reader",
            HF_HUB_OFFLINE=offline,
            RAY_ADDRESS=None,
            **environment,
        )
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, out.strip()) == (0, "['a', 'b']"), errors
        assert len(hub.downloads("model.safetensors")) == (0 if offline else 1)
    assert hub.seen == []
    assert (tmp_path / "home" / "models" / "org--embedded" / commit / "model.safetensors").is_file()
