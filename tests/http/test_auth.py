"""Who is served: the two keys, and a server without an inference key that speaks only to this machine."""

from __future__ import annotations

import asyncio
import http.client
from typing import Any

import httpx
import pytest

from sakuradite.config import ServerConfig
from sakuradite.errors import ConfigurationError
from sakuradite.http.app import App
from sakuradite.http.auth import is_loopback
from sakuradite.http.keys import Keys, without_keys
from tests.http.conftest import ADMIN_KEY, API_KEY, native
from tests.http.serving import FakeAdministration, ScriptedGateway, Served, serve

INFERENCE = [
    ("POST", "/v1/decisions"),
    ("POST", "/v1/systemone"),
    ("GET", "/v1/models"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
]
FOREIGN = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "[", "x]"]
OWN = ["localhost", "LOCALHOST:1", "127.0.0.1", "127.8.8.8:5", "[::1]", "[::1]:7777", "localhost."]
ORIGINS = ["http://evil.example", "null", "http://localhost:3000", "file://", "https://127.0.0.1.evil"]
ADMIN = [("GET", "/admin/v1/models"), ("GET", "/admin/v1/operations"), ("POST", "/admin/v1/models/load")]


def send(served: Served, method: str, path: str, key: str | None = None, **headers: str) -> httpx.Response:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = native() if path.startswith("/v1/") else {"model": "x"}
    return served.client.request(method, path, json=body if method == "POST" else None, headers=headers)


@pytest.mark.parametrize(("method", "path"), INFERENCE)
def test_the_inference_key_opens_inference_and_the_reference(keyed_server: Served, method: str, path: str) -> None:
    assert send(keyed_server, method, path, API_KEY).status_code == 200
    for key in (None, "wrong", ADMIN_KEY, API_KEY[:-1], API_KEY + "x"):
        response = send(keyed_server, method, path, key)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    basic = send(keyed_server, method, path, authorization=f"Basic {API_KEY}")
    assert basic.status_code == 401
    assert send(keyed_server, method, path, authorization=f"bearer {API_KEY}").status_code == 200
    named = send(keyed_server, method, path, **{"x-api-key": API_KEY})
    assert named.status_code == 401


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_the_admin_key_opens_administration_alone(
    open_server: Served, keyed_server: Served, method: str, path: str
) -> None:
    for served in (open_server, keyed_server):
        assert send(served, method, path, ADMIN_KEY).status_code in (200, 202)
        for key in (None, "wrong", API_KEY):
            assert send(served, method, path, key).status_code == 401


def test_without_an_admin_key_administration_is_closed() -> None:
    with serve(ScriptedGateway()) as served:
        for key in (None, "None", ADMIN_KEY):
            assert send(served, "GET", "/admin/v1/models", key).status_code == 401


def test_system_one_has_its_own_401(keyed_server: Served) -> None:
    detail = send(keyed_server, "POST", "/v1/systemone").json()["detail"]
    assert detail["error_type"] == "authentication_error"
    assert isinstance(detail["message"], str)


def test_without_a_key_an_authorization_header_is_ignored(open_server: Served) -> None:
    assert send(open_server, "POST", "/v1/systemone", "anything").status_code == 200
    assert send(open_server, "POST", "/v1/systemone", authorization="Basic x").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "[", "x]"]
)
def test_a_foreign_host_is_refused_without_a_key(open_server: Served, host: str) -> None:
    for method, path in INFERENCE:
        assert send(open_server, method, path, host=host).status_code == 403
    assert send(open_server, "GET", "/admin/v1/models", ADMIN_KEY, host=host).status_code == 403
    assert send(open_server, "GET", "/healthz", host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.8.8.8:5", "[::1]", "[::1]:7777", "localhost."]
)
def test_names_of_this_machine_pass(open_server: Served, host: str) -> None:
    assert send(open_server, "GET", "/v1/models", host=host).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:3000", "file://", "https://127.0.0.1.evil"]
)
def test_a_foreign_origin_is_refused_without_a_key(open_server: Served, origin: str) -> None:
    for method, path in INFERENCE:
        response = send(open_server, method, path, origin=origin)
        assert response.status_code == 403
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert send(open_server, "GET", "/v1/models", origin=open_server.url).status_code == 200


@pytest.mark.parametrize("hosts", [("evil.example", "localhost"), ("localhost", "evil.example")])
def test_a_second_host_does_not_hide_a_foreign_one(open_server: Served, hosts: tuple[str, str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", open_server.port)
    connection.putrequest("GET", "/v1/models", skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


def test_no_cross_origin_access_is_enabled(open_server: Served, keyed_server: Served) -> None:
    for served, key in ((open_server, None), (keyed_server, API_KEY)):
        headers = {"origin": served.url, "access-control-request-method": "POST"}
        response = served.client.options("/v1/decisions", headers=headers)
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert not [
            name
            for name in send(served, "POST", "/v1/decisions", key, origin=served.url).headers
            if name.startswith("access-control")
        ]


def test_with_a_key_any_host_may_name_this_server(keyed_server: Served) -> None:
    assert send(keyed_server, "GET", "/v1/models", API_KEY, host="api.example").status_code == 200


def test_allowed_hosts_are_checked_with_and_without_a_key() -> None:
    for key in (None, API_KEY):
        with serve(ScriptedGateway(), api_key=key, allowed_hosts=("api.example", "Other.Example:8443")) as served:
            for host, status in (
                ("api.example:80", 200),
                ("other.example", 200),
                ("localhost", 200),
                ("evil.example", 403),
            ):
                assert send(served, "GET", "/v1/models", key, host=host).status_code == status


def test_only_callers_on_this_machine_are_served_without_a_key() -> None:
    app = App(ServerConfig(), ScriptedGateway(), FakeAdministration())
    for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert call(app, "GET", "/v1/models", (address, 5)) == 200
    for client in (("10.0.0.7", 5), None):
        assert call(app, "GET", "/v1/models", client) == 403


def call(app: App, method: str, path: str, client: Any) -> int:
    """The status of a request that comes from a made-up address."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", b"localhost")], "client": client}
    asyncio.run(app(scope, receive, send))
    status: int = sent[0]["status"]
    return status


def test_serving_others_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.7", "api.example"):
        with pytest.raises(ConfigurationError, match="SAKURADITE_API_KEY"):
            App(ServerConfig(host=host), ScriptedGateway(), FakeAdministration())
        App(ServerConfig(host=host, api_key="k"), ScriptedGateway(), FakeAdministration())
    with pytest.raises(ConfigurationError, match="inference key"):
        App(ServerConfig(), ScriptedGateway(), FakeAdministration(), proxied=True)


def test_keys_reach_the_application_as_hashes() -> None:
    config = ServerConfig(api_key=API_KEY, admin_key=ADMIN_KEY)
    keys = Keys.of(config)
    bare = without_keys(config)
    assert API_KEY not in repr((keys, bare, bare.model_dump()))
    app = App(bare, ScriptedGateway(), FakeAdministration(), keys=keys)
    assert app.gatekeeper.keys.inference is not None
    assert app.gatekeeper.keys.inference.matches(API_KEY.encode())
    assert not app.gatekeeper.keys.inference.matches(ADMIN_KEY.encode())
    assert app.site.config.api_key is None
    assert app.site.config.admin_key is None


@pytest.mark.parametrize("key", ["", " ", "a\n", "é", " a"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="api_key"):
        Keys.of(ServerConfig(api_key=key))


def test_one_key_for_both_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="differ"):
        Keys.of(ServerConfig(api_key="k", admin_key="k"))


def test_what_is_this_machine() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"):
        assert is_loopback(host)
    for host in ("", "0.0.0.0", "::", "localhost.evil", "128.0.0.1", "::ffff:10.0.0.1", "1", "0x7f.1"):
        assert not is_loopback(host)
