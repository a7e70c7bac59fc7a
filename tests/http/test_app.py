"""The application as a server meets it: health, the list of models, prefixes, lifespan, other protocols."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from sakuradite.config import ServerConfig
from sakuradite.http.app import App
from tests.http.serving import ALIASES, CREATED, MODEL, FakeAdministration, ScriptedGateway, Served, serve


def test_health_needs_no_key_and_takes_head(keyed_server: Served) -> None:
    for path, body in (("/healthz", {"status": "ok"}), ("/readyz", {"status": "ready"})):
        response = keyed_server.client.get(path)
        assert (response.status_code, response.json()) == (200, body)
        head = keyed_server.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == response.headers["content-length"]


def test_nothing_is_ready_before_a_model_is() -> None:
    gateway = ScriptedGateway()
    gateway.models = []
    with serve(gateway) as served:
        assert served.client.get("/healthz").status_code == 200
        response = served.client.get("/readyz")
        assert (response.status_code, response.json()) == (503, {"status": "waiting"})
        assert response.headers["retry-after"] == "1"
        assert served.client.get("/v1/models").json() == {"models": [], "object": "list", "data": []}


def test_models_are_listed_for_every_client(client: httpx.Client) -> None:
    body = client.get("/v1/models").json()
    names = [MODEL, *ALIASES]
    assert [m["name"] for m in body["models"]] == [m["id"] for m in body["data"]] == names
    assert {m["release_date"] for m in body["models"]} == {"2025-04-27"}
    assert body["data"][0] == {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "sakuradite"}
    assert body["models"][1]["description"] == f"Alias of {MODEL}"


def test_no_response_may_be_kept_or_guessed(client: httpx.Client) -> None:
    for path in ("/healthz", "/v1/models", "/docs", "/nothing"):
        headers = client.get(path).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"


def run(scope: dict[str, Any], incoming: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an application sends for a scope."""
    app = App(ServerConfig(), ScriptedGateway(), FakeAdministration())
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    ("path", "root", "status"),
    [("/p/healthz", "/p", 200), ("/p/healthz", "/p/", 200), ("/healthz", "/p", 200), ("/px/healthz", "/p", 404)],
)
def test_a_prefix_in_front_is_taken_off(path: str, root: str, status: int) -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "root_path": root,
        "headers": [],
        "client": None,
    }
    assert run(scope, [])[0]["status"] == status


def test_lifespan() -> None:
    incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent = [message["type"] for message in run({"type": "lifespan"}, incoming)]
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_websockets_are_refused() -> None:
    assert run({"type": "websocket"}, []) == [{"type": "websocket.close", "code": 1003}]
