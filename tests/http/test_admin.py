"""The administration routes: what they hand on, and what they answer with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sakuradite.config import ModelConfig
from tests.http.conftest import ADMIN_KEY
from tests.http.serving import MODEL, FakeAdministration, ScriptedGateway, Served, serve


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(ScriptedGateway(), admin_key=ADMIN_KEY) as served:
        served.client.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        yield served


@pytest.fixture
def calls(served: Served) -> list[tuple[Any, ...]]:
    administration: FakeAdministration = served.administration
    administration.calls.clear()
    return administration.calls


def ask(served: Served, method: str, path: str, body: Any = None) -> httpx.Response:
    return served.client.request(method, f"/admin/v1{path}", json=body)


def test_models(served: Served, calls: list[tuple[Any, ...]]) -> None:
    (model,) = ask(served, "GET", "/models").json()
    assert model["model"] == MODEL
    assert model["status"] == "ready"
    assert set(model) >= {"config", "capabilities", "replicas", "storage", "aliases", "last_error"}
    assert calls == [("models",)]


def test_inspect_and_pull(served: Served, calls: list[tuple[Any, ...]]) -> None:
    response = ask(served, "POST", "/models/inspect", {"model": "a/b"})
    assert response.json()["calibrated"] is False
    response = ask(served, "POST", "/models/pull", {"model": "a/b", "revision": "main", "offline": True})
    assert response.status_code == 202
    assert response.json()["status"] == "pending"
    assert calls == [("inspect", "a/b", None, False), ("pull", "a/b", "main", True)]


def test_load_takes_a_whole_configuration(served: Served, calls: list[tuple[Any, ...]]) -> None:
    body = {"model": "a/b", "dtype": "bfloat16", "replicas": {"min": 0, "max": 4}, "resources": {"MLX": 1}}
    assert ask(served, "POST", "/models/load", body).status_code == 202
    assert calls == [("load", ModelConfig.model_validate(body))]


@pytest.mark.parametrize(
    ("path", "body", "loc"),
    [
        ("/models/load", {}, ["model"]),
        ("/models/load", {"model": "x", "dtpye": "float32"}, ["dtpye"]),
        ("/models/load", {"model": "x", "dtype": "int3"}, ["dtype"]),
        ("/models/load", {"model": "x", "max_batch_size": 0}, ["max_batch_size"]),
        ("/models/load", {"model": "x", "max_batch_size": "1"}, ["max_batch_size"]),
        ("/models/load", {"model": "x", "resources": {"MLX": False}}, ["resources", "MLX"]),
        ("/models/load", {"model": "x", "replicas": {"min": 3, "max": 1}}, ["replicas"]),
        ("/models/pull", {"model": 5}, ["model"]),
        ("/models/pull", {"model": "x", "offline": "yes"}, ["offline"]),
        ("/models/inspect", [], []),
        ("/models/unload", {"model": ""}, ["model"]),
    ],
)
def test_a_wrong_body_is_located(served: Served, path: str, body: Any, loc: list[str]) -> None:
    response = ask(served, "POST", path, body)
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", *loc]


def test_unload_and_remove(served: Served, calls: list[tuple[Any, ...]]) -> None:
    assert ask(served, "POST", "/models/unload", {"model": "a/b"}).json()["status"] == "unloaded"
    response = ask(served, "DELETE", "/models?model=a%2Fb%3Fx%26y")
    assert response.json() == {"model": "a/b?x&y", "status": "removed"}
    assert ask(served, "DELETE", f"/models?model={MODEL}").status_code == 409
    assert calls == [("unload", "a/b"), ("remove", "a/b?x&y"), ("remove", MODEL)]
    for query in ("", "?model=", "?model=a&model=b", "?name=a"):
        response = ask(served, "DELETE", f"/models{query}")
        assert response.status_code == 422
        assert response.json()["detail"][0]["loc"] == ["query", "model"]


def test_operations(served: Served, calls: list[tuple[Any, ...]]) -> None:
    assert [o["id"] for o in ask(served, "GET", "/operations").json()] == ["op_1"]
    operation = ask(served, "GET", "/operations/op_1").json()
    assert operation["progress"] == {"phase": "pending", "reason": None, "bytes_done": None, "bytes_total": None}
    assert ask(served, "GET", "/operations/gone").status_code == 404
    assert calls[1:] == [("operation", "op_1"), ("operation", "gone")]


def test_aliases(served: Served) -> None:
    assert ask(served, "PUT", "/aliases/tri%20age", {"model": "a/b"}).json() == {"alias": "tri age", "model": "a/b"}
    assert ask(served, "GET", "/aliases/tri%20age").json()["model"] == "a/b"
    assert {a["alias"] for a in ask(served, "GET", "/aliases").json()} == {"default", "tri age"}
    assert ask(served, "DELETE", "/aliases/tri%20age").status_code == 200
    for method in ("GET", "DELETE"):
        assert ask(served, method, "/aliases/tri%20age").status_code == 404


def test_bodies_are_small(served: Served) -> None:
    assert ask(served, "POST", "/models/pull", {"model": "x" * (1 << 20)}).status_code == 413
