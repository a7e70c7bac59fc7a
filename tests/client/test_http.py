"""Connections and errors over HTTP: what is sent, what is tried again, and what each failure is called."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from sakuradite import APIError, Sakuradite, TransportError
from sakuradite.client import http
from sakuradite.errors import (
    CapacityExceededError,
    ConfigurationError,
    ContextExceededError,
    ForbiddenError,
    ModelNotFoundError,
    ReplicaUnavailableError,
    RequestTimeoutError,
    UnauthorizedError,
    ValidationError,
)
from tests.client.conftest import ADMIN_KEY, API_KEY, QUESTIONS
from tests.client.raw import RawServer, error, reply
from tests.http.serving import MODEL, Served, serve

Q = {"q": {"type": "noul", "instructions": "It is so."}}
ANSWER = {"type": "noul", "noul": 0.75, "x_label_mass": 0.9}
GOOD = {"model": MODEL, "answers": {"q": ANSWER}, "usage": {"input_tokens": 7, "output_tokens": 0}}

type Raw = Callable[..., RawServer]


def decide(url: str, timeout: float | None = None, **options: Any) -> Any:
    with Sakuradite(MODEL, base_url=url, **options) as client:
        return client.decide("x", Q, timeout=timeout)


# What is sent


def test_a_request_is_one_post_with_json(raw: Raw) -> None:
    server = raw([reply(200, GOOD)])
    result = decide(server.url, api_key=API_KEY)
    assert result.answers["q"].noul == 0.75
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/decisions HTTP/1.1\r\n")
    assert f"authorization: bearer {API_KEY}".encode() in head.lower()
    assert orjson.loads(body) == {"model": MODEL, "state": "x", "questions": Q}


def test_a_path_in_front_of_the_routes_is_kept(raw: Raw) -> None:
    server = raw([reply(200, GOOD)])
    decide(server.url + "/behind/proxy/")
    assert server.requests[0].startswith(b"POST /behind/proxy/v1/decisions ")


def test_no_key_no_authorization(raw: Raw) -> None:
    server = raw([reply(200, GOOD)])
    decide(server.url, admin_key=ADMIN_KEY)  # the keys are not interchangeable
    assert b"authorization" not in server.requests[0].lower()


def test_long_integers_keep_their_digits(raw: Raw) -> None:
    server = raw([reply(200, GOOD)])
    with Sakuradite(MODEL, base_url=server.url) as client:
        client.decide({"id": 1180591620717411303424, "z": 1, "a": 2}, Q)
    assert b'{"id":1180591620717411303424,"z":1,"a":2}' in server.requests[0]


def test_connections_are_kept_alive(raw: Raw) -> None:
    server = raw([reply(200, GOOD)], keep_open=True)
    with Sakuradite(MODEL, base_url=server.url) as client:
        for _ in range(5):
            client.decide("x", Q)
    assert len(server.requests) == 5
    assert server.connections == 1


# Errors


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (error(404, "model_not_found", "no such model"), ModelNotFoundError, "no such model"),
        (error(413, "context_exceeded", "9000 tokens, 8192 allowed"), ContextExceededError, "9000 tokens"),
        (error(429, "capacity_exceeded", "full", "retry-after: 7"), CapacityExceededError, "full"),
        (error(503, "replica_unavailable"), ReplicaUnavailableError, "no"),
        (error(504, "request_timeout"), RequestTimeoutError, "no"),
        (error(403, "forbidden"), ForbiddenError, "no"),
        (error(401, "unauthorized", "wrong key"), UnauthorizedError, "wrong key.*SAKURADITE_API_KEY"),
        (error(418, "teapot"), APIError, "no"),
        (reply(404, b"<html>", "content-type: text/html"), APIError, "404 X, and not from Sakuradite .text/html."),
        (reply(502, b"{}"), APIError, "502 X, and not from Sakuradite"),
        (reply(500, b'{"error": 3}'), APIError, "500 X, and not from Sakuradite"),
    ],
)
def test_error_answers_are_raised_as_their_class(raw: Raw, answer: bytes, kind: type[APIError], message: str) -> None:
    server = raw([answer])
    with pytest.raises(kind, match=message) as raised:
        decide(server.url)
    assert raised.value.status == int(answer.split()[1])
    assert raised.value.retry_after == (7.0 if b"retry-after" in answer else None)
    assert len(server.requests) == 1


def test_an_error_of_an_unknown_code_keeps_code_status_and_request_id(raw: Raw) -> None:
    server = raw([error(418, "teapot", "short and stout", "x-request-id: req_1")])
    with pytest.raises(APIError) as raised:
        decide(server.url)
    assert (raised.value.code, raised.value.status, raised.value.request_id) == ("teapot", 418, "req_1")


@pytest.mark.parametrize(("value", "seconds"), [("3", 3.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", None)])
def test_retry_after_is_a_number_or_a_date(raw: Raw, value: str, seconds: float | None) -> None:
    with pytest.raises(CapacityExceededError) as raised:
        decide(raw([error(429, "capacity_exceeded", "full", f"retry-after: {value}")]).url)
    assert raised.value.retry_after == seconds


def test_a_422_of_the_server_lists_its_fields(server: Served) -> None:
    with Sakuradite(MODEL, base_url=server.url) as client, pytest.raises(ValidationError) as raised:
        client.decide("x", {f"q{i}": Q["q"] for i in range(401)})
    assert raised.value.detail[0].loc == ("body", "questions")
    assert "400" in str(raised.value)


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        orjson.dumps(GOOD | {"answers": {"q": {"type": "noul", "noul": "high"}}}),
        orjson.dumps(GOOD | {"answers": {}}),
        orjson.dumps(GOOD | {"answers": {"q": ANSWER, "r": ANSWER}}),
        orjson.dumps(
            GOOD | {"answers": {"q": {"type": "choice", "choice": "a", "confidence": 1, "probabilities": {"a": 1}}}}
        ),
    ],
)
def test_an_answer_that_does_not_fit_is_a_transport_error(raw: Raw, body: bytes) -> None:
    with pytest.raises(TransportError, match="the server's answer"):
        decide(raw([reply(200, body)]).url)


def test_redirects_are_not_followed(raw: Raw) -> None:
    target = raw([reply(200, GOOD)])
    server = raw([reply(307, b"", f"location: {target.url}/v1/decisions")])
    with pytest.raises(TransportError, match=f"redirects to {target.url}"):
        decide(server.url, api_key=API_KEY)
    assert not target.requests


CUT_OFF: list[list[bytes]] = [[], [b"HTTP/1.1 200 OK\r\n"], [reply(200, GOOD)[:-10]]]


@pytest.mark.parametrize("steps", CUT_OFF)
def test_a_decision_whose_connection_broke_is_sent_once_more(raw: Raw, steps: list[bytes]) -> None:
    server = raw(steps, [reply(200, GOOD)])
    assert decide(server.url).answers
    assert len(server.requests) == 2
    assert server.requests[0] == server.requests[1]


@pytest.mark.parametrize("steps", CUT_OFF)
def test_an_answer_cut_off_twice_is_a_transport_error(raw: Raw, steps: list[bytes]) -> None:
    server = raw(steps)
    with pytest.raises(TransportError) as raised:
        decide(server.url, retries=3)
    assert raised.value.sent
    assert len(server.requests) == 2


def test_a_deadline_of_the_client_ends_the_request(raw: Raw) -> None:
    server = raw([60.0])
    with pytest.raises(RequestTimeoutError, match=r"waited 0\.2 seconds in vain"):
        decide(server.url, timeout=0.2)
    assert server.gone.wait(10)


def test_a_server_that_is_overdue_is_asked_whether_it_is_there(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PATIENCE", 0.1)
    monkeypatch.setattr(http, "PROBE_EVERY", 0.1)
    patient = raw([0.5, reply(200, GOOD)], [reply(200, {})])  # the probes come on connections of their own
    assert decide(patient.url).answers
    assert any(request.startswith(b"GET /healthz ") for request in patient.requests)
    dead = raw([60.0])
    with pytest.raises(TransportError, match="no longer answers"):
        decide(dead.url)


# Trying again


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_nobody_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        TransportError, match=r"cannot reach .*: Connection refused; is the daemon running.*serve"
    ) as no:
        decide(url)
    assert not no.value.sent


def test_a_connection_that_could_not_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_RETRY_WAIT", 0.3)
    port = free_port()

    async def main() -> Any:
        async with Sakuradite(MODEL, base_url=f"http://127.0.0.1:{port}") as client:
            deciding = asyncio.create_task(client.decide("x", Q))
            await asyncio.sleep(0.1)
            listener = await asyncio.start_server(_answer, "127.0.0.1", port)
            async with listener:
                return await deciding

    async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply(200, GOOD, "connection: close"))
        writer.close()

    assert asyncio.run(main()).answers


def test_retries_heed_retry_after(raw: Raw) -> None:
    full = error(429, "capacity_exceeded", "full", "retry-after: 0")
    server = raw([full], [error(503, "replica_unavailable", "no", "retry-after: 0")], [reply(200, GOOD)])
    assert decide(server.url, retries=2).answers
    assert len(server.requests) == 3


def test_without_retries_nothing_is_asked_twice(raw: Raw) -> None:
    server = raw([error(429, "capacity_exceeded", "full", "retry-after: 0")], [reply(200, GOOD)])
    with pytest.raises(CapacityExceededError):
        decide(server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [(500, "internal_error"), (503, "model_load_failed"), (504, "request_timeout")])
def test_what_does_not_pass_is_not_retried(raw: Raw, status: tuple[int, str]) -> None:
    server = raw([error(*status)], [reply(200, GOOD)])
    with pytest.raises(APIError):
        decide(server.url, retries=5)
    assert len(server.requests) == 1


def test_a_wait_beyond_the_deadline_is_not_begun(raw: Raw) -> None:
    server = raw([error(429, "capacity_exceeded", "full", "retry-after: 20")], [reply(200, GOOD)])
    with pytest.raises(CapacityExceededError):
        decide(server.url, retries=5, timeout=5)
    assert len(server.requests) == 1


# Where connections go


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_loopback_is_never_proxied(server: Served, monkeypatch: pytest.MonkeyPatch, name: str, variable: str) -> None:
    for proxy in ("http://127.0.0.1:9", "socks5://127.0.0.1:9"):
        monkeypatch.setenv(variable, proxy)
        assert decide(f"http://{name}:{server.port}").answers


def test_other_hosts_honour_proxies(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = raw([reply(200, GOOD)])
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    assert decide("http://sakuradite.invalid:7777").answers
    assert proxy.requests[0].startswith(b"POST http://sakuradite.invalid:7777/v1/decisions ")


def test_a_socks_proxy_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match=r"httpx\[socks\]"):
        decide("http://sakuradite.invalid:7777")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_localhost_finds_a_server_on_either_address(raw: Raw, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ipv6_first(name: str, port: int, *_: Any, **__: Any) -> list[Any]:
        kind = socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
        return [(socket.AF_INET6, *kind, ("::1", port, 0, 0)), (socket.AF_INET, *kind, ("127.0.0.1", port))]

    server = raw([reply(200, GOOD)], host=host)
    monkeypatch.setattr(socket, "getaddrinfo", ipv6_first)
    assert decide(f"http://localhost:{server.port}").answers


@pytest.mark.parametrize(
    "url", ["127.0.0.1:7777", "ftp://x", "http://", "http://u:p@x", "http://x/?a=1", "http://x/#f"]
)
def test_a_base_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url must"):
        Sakuradite(MODEL, base_url=url)


# A client of the caller's


def test_an_own_client_is_used_and_left_open(server: Served) -> None:
    seen: list[httpx.Request] = []
    with httpx.Client(event_hooks={"request": [seen.append]}, trust_env=False) as own:
        with Sakuradite(MODEL, base_url=server.url, http_client=own) as client:
            assert client.decide("x", QUESTIONS).answers
            with client.decide("x", QUESTIONS, stream=True) as stream:
                assert [event.type for event in stream][-1] == "complete"
        assert len(seen) == 2
        assert not own.is_closed


async def test_an_own_async_client_is_used_and_left_open(server: Served) -> None:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as own:
        async with Sakuradite(MODEL, http_client=own) as client:  # its base URL will do
            assert (await client.decide("x", QUESTIONS)).answers
        assert not own.is_closed


def test_an_own_client_may_have_a_mock_transport() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=GOOD))
    with httpx.Client(transport=transport) as own:
        assert decide("http://nowhere.invalid", http_client=own).answers


async def test_an_async_client_of_your_own_needs_async_with() -> None:
    async with httpx.AsyncClient() as own:
        client = Sakuradite(MODEL, base_url="http://x", http_client=own)
        with pytest.raises(ConfigurationError, match="belongs to one event loop"):
            await client.decide("x", Q)


def test_an_own_client_without_a_url_is_refused() -> None:
    with httpx.Client() as own, pytest.raises(ConfigurationError, match="needs a base URL"):
        Sakuradite(MODEL, http_client=own)


# The admin key


def write_key(home: Path, key: str = ADMIN_KEY, mode: int = 0o600) -> Path:
    path = home / "admin.key"
    path.write_text(key + "\n")
    path.chmod(mode)
    return path


@pytest.fixture
def default_url(server: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server at what the SDK takes for the default URL."""
    monkeypatch.setattr(http, "DEFAULT_BASE_URL", server.url)
    return server.url


def test_the_admin_key_of_the_home_opens_the_default_url(default_url: str, home: Path) -> None:
    write_key(home)
    with Sakuradite(base_url=default_url + "/") as client:
        assert client.models.list()[0].model == MODEL


def test_another_url_needs_the_key_explicitly(server: Served, home: Path) -> None:
    write_key(home)
    with Sakuradite(base_url=server.url) as client, pytest.raises(UnauthorizedError, match="SAKURADITE_ADMIN_KEY"):
        client.models.list()


def test_a_key_file_that_others_can_read_is_refused(default_url: str, home: Path) -> None:
    write_key(home, mode=0o640)
    with Sakuradite(base_url=default_url) as client, pytest.raises(ConfigurationError, match=r"admin.key can be read"):
        client.models.list()


def test_a_key_file_that_is_a_link_is_refused(default_url: str, home: Path, tmp_path: Path) -> None:
    os.symlink(write_key(tmp_path), home / "admin.key")
    with Sakuradite(base_url=default_url) as client, pytest.raises(ConfigurationError, match="symlink"):
        client.models.list()


def test_keys_are_not_interchangeable() -> None:
    with serve(api_key=API_KEY, admin_key=ADMIN_KEY) as served:
        with Sakuradite(MODEL, base_url=served.url, api_key=ADMIN_KEY, admin_key=API_KEY) as swapped:
            with pytest.raises(UnauthorizedError):
                swapped.decide("x", Q)
            with pytest.raises(UnauthorizedError):
                swapped.models.list()
        with Sakuradite(MODEL, base_url=served.url, api_key=API_KEY, admin_key=ADMIN_KEY) as client:
            assert client.decide("x", Q).answers
            assert client.models.list()


def test_a_slow_answer_does_not_hold_up_another_thread(raw: Raw) -> None:
    server = raw([1.0, reply(200, GOOD)], [reply(200, GOOD)])
    with Sakuradite(MODEL, base_url=server.url) as client:
        import threading

        slow = threading.Thread(target=client.decide, args=("x", Q))
        slow.start()
        while not server.requests:
            time.sleep(0.01)
        assert client.decide("x", Q).answers
        assert slow.is_alive()
        slow.join()
