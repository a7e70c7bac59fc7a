"""Bodies: their size, encodings and types, and the bounds on what one router holds."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import zstandard

from sakuradite.errors import RequestTooLargeError
from sakuradite.http import protocol
from sakuradite.http.body import expand
from sakuradite.http.protocol import MAX_HEAD_BYTES
from sakuradite.records import Outcome, RequestRecord
from tests.http.conftest import native, openai
from tests.http.serving import MODEL, ScriptedGateway, Served, even, serve

BODY = json.dumps(native(state="x" * 2000)).encode()
LIMIT = 64 * 1024


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A server that takes 64 KiB."""
    with serve(ScriptedGateway(), max_request_bytes=LIMIT) as served:
        yield served


def head(length: int) -> bytes:
    """The head of a request as it goes over the wire."""
    lines = ("POST /v1/decisions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


def post(
    served: Served, content: bytes | Iterator[bytes], path: str = "/v1/decisions", **headers: str
) -> httpx.Response:
    sent = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return served.client.post(path, content=content, headers=sent)


def zstd_streamed(data: bytes) -> bytes:
    """A frame that does not say its size."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


HALF = len(BODY) // 2
OTHER_TYPES = [
    "text/plain",
    "",
    "application/x-www-form-urlencoded",
    "application/json; charset=latin-1",
    "application/jsonx",
    "multipart/form-data; boundary=x",
]
JSON_TYPES = [
    "application/json",
    "application/json; charset=utf-8",
    'Application/JSON;Charset="UTF-8"',
    "application/json;x=y",
]
ENCODED = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY[:HALF]) + gzip.compress(BODY[HALF:]),
    "GZIP": gzip.compress(BODY),
    "zstd": zstandard.ZstdCompressor(level=19).compress(BODY),
    "zstd ": zstd_streamed(BODY),
    "Zstd": zstandard.compress(BODY[:HALF]) + zstandard.compress(BODY[HALF:]),
    "zstD": zstd_streamed(BODY[:HALF]) + zstandard.compress(BODY[HALF:]),
    "identity": BODY,
}


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/systemone"])
def test_compressed_bodies_are_read(small: Served, encoding: str, path: str) -> None:
    response = post(small, ENCODED[encoding], path, content_encoding=encoding.strip())
    assert response.status_code == 200, response.text
    assert small.gateway.requests[-1].state == ("x" * 2000,)


@pytest.mark.parametrize("encoding", [name for name in ENCODED if name != "identity"])
def test_a_damaged_or_cut_body_is_422(small: Served, encoding: str) -> None:
    data = ENCODED[encoding]
    for broken in (data[:-1], data[:-5], data[: len(data) // 2], b"", data + b"x", BODY):
        for path in ("/v1/decisions", "/v1/systemone"):
            response = post(small, broken, path, content_encoding=encoding.strip())
            assert response.status_code == 422, (response.text, len(broken))
            assert response.json()["detail"][0]["loc"] == ["body"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd", "compress", "gzip;q=1"])
def test_another_encoding_is_415(small: Served, encoding: str) -> None:
    for path in ("/v1/decisions", "/v1/systemone"):
        assert post(small, BODY, path, content_encoding=encoding).status_code == 415


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_another_content_type_is_415(small: Served, kind: str) -> None:
    assert post(small, BODY, content_type=kind).status_code == 415
    if not kind.startswith("multipart"):
        response = post(small, BODY, "/v1/systemone", content_type=kind)
        assert response.status_code == 415
        assert response.json()["detail"]["error_type"] == "api_usage_error"


def test_no_content_type_is_415(small: Served) -> None:
    request = httpx.Request("POST", f"{small.url}/v1/decisions", content=BODY)
    assert small.client.send(request).status_code == 415


@pytest.mark.parametrize("kind", JSON_TYPES)
def test_json_in_utf_8_is_taken(small: Served, kind: str) -> None:
    assert post(small, BODY, content_type=kind).status_code == 200


def test_the_limit_holds_with_and_without_a_length(small: Served) -> None:
    fits = json.dumps(native(state="")).encode()
    fits = json.dumps(native(state="x" * (LIMIT - len(fits)))).encode()
    assert len(fits) == LIMIT
    assert post(small, fits).status_code == 200
    assert post(small, iter([fits[:100], fits[100:]])).status_code == 200
    for path in ("/v1/decisions", "/v1/systemone"):
        for content in (fits + b" ", iter([fits, b" "])):
            response = post(small, content, path)
            assert response.status_code == 413
            assert "65536" in response.text


def test_a_large_body_gets_its_413_instead_of_a_broken_pipe(small: Served) -> None:
    for content in (b"x" * (40 << 20), (b"x" * 65536 for _ in range(640))):
        response = post(small, content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


def bombs() -> dict[str, bytes]:
    """128 MiB of zeros, in a few kilobytes."""
    pack = zlib.compressobj(9, wbits=31)
    zeros = bytes(1 << 20)
    gz = b"".join(pack.compress(zeros) for _ in range(128)) + pack.flush()
    frames = zstandard.ZstdCompressor(level=19).compressobj()
    unsized = b"".join(frames.compress(zeros) for _ in range(128)) + frames.flush()
    return {"gzip": gz, "zstd": zstandard.ZstdCompressor().compress(bytes(128 << 20)), "zstd-unsized": unsized}


def test_a_bomb_is_refused_long_before_it_is_expanded() -> None:
    for name, bomb in bombs().items():
        tracemalloc.start()
        with pytest.raises(RequestTooLargeError):
            expand(bomb, {b"content-encoding": name.partition("-")[0].encode()}, LIMIT)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 40 << 20, name


def test_a_bomb_over_http_is_413(small: Served) -> None:
    small_bomb = gzip.compress(bytes(8 << 20))
    assert post(small, small_bomb, content_encoding="gzip").status_code == 413


def test_a_length_that_lies_does_not_stop_the_server(open_server: Served) -> None:
    for length in (len(BODY) + 10, 10**20):
        with socket.create_connection(("127.0.0.1", open_server.port)) as caller:
            caller.sendall(head(length) + BODY)
    assert open_server.client.get("/healthz").status_code == 200


def test_a_body_that_stops_coming_is_given_up(scripted: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakuradite.http.body.READ_TIMEOUT", 0.3)
    served = scripted()
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as caller:
        caller.sendall(head(100) + b'{"model"')
        assert caller.recv(100).startswith(b"HTTP/1.1 400 ")
    assert served.app.site.admission.requests == 0


def test_overload_is_429_with_retry_after_and_health_stays_green() -> None:
    gate = threading.Event()

    async def held(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        await asyncio.to_thread(gate.wait)
        yield [even(request, 0)]

    with serve(ScriptedGateway(held), max_pending_requests=16) as served, ThreadPoolExecutor(60) as pool:
        limits = httpx.Limits(max_connections=100)
        with httpx.Client(base_url=served.url, trust_env=False, limits=limits, timeout=30) as client:
            waiting = [pool.submit(client.post, "/v1/decisions", json=native()) for _ in range(60)]
            end = time.monotonic() + 30
            while sum(f.done() for f in waiting) < 44:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert client.get("/healthz").status_code == 200
            assert client.get("/readyz").status_code == 200
            full = client.post("/v1/systemone", json=native())
            assert full.status_code == 429
            assert full.json()["detail"]["error_type"] == "rate_limit_error"
            gate.set()
            responses = [f.result() for f in waiting]
        assert sorted(r.status_code for r in responses) == [200] * 16 + [429] * 44
        refused = [r for r in responses if r.status_code == 429]
        assert {r.headers["retry-after"] for r in refused} == {"1"}
        assert {r.json()["error"]["code"] for r in refused} == {"capacity_exceeded"}
        assert served.app.site.admission.requests == served.app.site.admission.bytes == 0


def test_bytes_of_all_bodies_together_are_bounded(small: Served) -> None:
    admission = small.app.site.admission
    with admission.place() as place:
        place.hold(admission.max_bytes - 10)
        assert post(small, BODY).status_code == 429
    assert post(small, BODY).status_code == 200
    assert admission.bytes == 0


@pytest.mark.parametrize(
    "content",
    [
        b'{"model":"M","state":"' + b'\\"' * 500_000,
        b'{"model":"M","state":"' + b"\\\\" * 500_000 + b"\\",
        b'{"model":"M","state":' + b'"a",' * 250_000,
        b"{" + b'"a":{' * 90 + b'"' * 900_000,
    ],
)
def test_what_is_wrong_is_found_without_looking_twice(open_server: Served, content: bytes) -> None:
    """A megabyte that is read again from each of its quotes would take hours."""
    assert post(open_server, content).status_code == 422


def test_the_heads_of_parts_are_short(open_server: Served) -> None:
    head_ = b"--b\r\n" + b"content-disposition: form-data;" * 300_000
    response = post(
        open_server, head_ + b"\r\n\r\nx\r\n--b--", "/v1/systemone", content_type="multipart/form-data; boundary=b"
    )
    assert response.status_code == 422


MANY: dict[str, Any] = {str(i): 1 for i in range(200_000)}
CROWDS: list[tuple[dict[str, Any], list[Any]]] = [
    (native() | MANY, []),
    (native(MANY), ["questions"]),
    (native({"q": {"type": "noul"} | MANY}), ["questions", "q"]),
    (native({"q": {"type": "choice", "criteria": MANY}}), ["questions", "q", "criteria"]),
    (native(list(MANY)), ["questions"]),
    (openai() | MANY, []),
    (openai(input=[1] * 200_000), ["input"]),
    (openai(input=[MANY]), ["input", 0]),
    (openai(input=[{"role": "user", "content": [1] * 200_000}]), ["input", 0, "content"]),
    (openai(input=[{"role": "user", "content": [MANY]}]), ["input", 0, "content", 0]),
    (openai(questions=[{"type": "choice", "instructions": "", "choices": [MANY]}]), ["questions", 0, "choices", 0]),
]


@pytest.mark.parametrize(("body", "path"), CROWDS, ids=[str(path) for _, path in CROWDS])
def test_crowds_are_refused_before_they_are_validated(open_server: Served, body: Any, path: list[Any]) -> None:
    response = post(open_server, json.dumps(body).encode())
    assert response.status_code == 422
    (problem,) = response.json()["detail"]
    assert problem["loc"] == ["body", *path]
    assert "200" in problem["msg"]
    if "input" not in body and isinstance(body["questions"], dict):
        response = post(open_server, json.dumps(body).encode(), "/v1/systemone")
        assert response.json()["detail"] == [problem]


def test_long_content_is_no_crowd(open_server: Served) -> None:
    many = native(
        {"q": {"type": "noul", "instructions": [0] * 1000, "criteria": {"true": [0] * 1000}}}, state=[0] * 1000
    )
    assert post(open_server, json.dumps(many).encode()).status_code == 200


def test_one_bad_row_does_not_fail_the_others(open_server: Served) -> None:
    long = native({"q": {"type": "noul", "instructions": "x" * 9000}})
    with ThreadPoolExecutor(3) as pool:
        bodies = [json.dumps(b).encode() for b in (native(), long, native())]
        responses = list(pool.map(lambda body: post(open_server, body), bodies))
    assert [r.status_code for r in responses] == [200, 413, 200]
    assert responses[0].json()["model"] == MODEL


POST = b"POST /v1/decisions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST + b"-1\r\n\r\n{}", 400),
        (POST + b"two\r\n\r\n{}", 400),
        (POST + b"1".ljust(30, b"0") + b"\r\n\r\n{}", 400),
        (b"BREW /v1/decisions HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /healthz HTTP/1.1\r\nX-Long: ".ljust(MAX_HEAD_BYTES + 1, b"y"), 431),
    ],
    ids=["negative length", "length in words", "huge length", "no method", "TLS", "long head"],
)
def test_what_is_no_http_gets_json_and_a_request_id(small: Served, sent: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.settimeout(30)
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    headers, _, body = received.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 %d " % status)
    assert b"x-request-id: req_" in headers
    assert b"x-typesafe-request-id: req_" in headers
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert small.client.get("/healthz").status_code == 200


def test_a_head_without_end_is_cut(small: Served) -> None:
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX-Long: ")
        with pytest.raises(ConnectionError):
            connection.sendall(b"y" * (64 << 20))
    assert small.client.get("/healthz").status_code == 200


def answered(connection: socket.socket, end: bytes) -> bool:
    """Read one answer, whose last bytes are known: whether it is a good one."""
    received = b""
    while not received.endswith(end) and (chunk := connection.recv(65536)):
        received += chunk
    return received.startswith(b"HTTP/1.1 200 ") and received.endswith(end)


@pytest.mark.parametrize(
    ("before", "sent", "status"),
    [
        (b"", b"", b""),
        (b"", b"GET /healthz HTTP/1.1\r\nX: ", b"HTTP/1.1 408 "),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /hea", b"HTTP/1.1 408 "),
    ],
    ids=["nothing at all", "half a head", "half of the second head"],
)
def test_a_head_that_does_not_come_to_its_end_is_not_waited_for(
    small: Served, before: bytes, sent: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.settimeout(30)
        if before:
            connection.sendall(before)
            answer = b""
            while not answer.endswith(b"}"):  # head and body may come apart
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
        received = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(10):  # a byte now and then does not prolong it
                connection.sendall(sent)
                sent = b"x" if sent else b""
                time.sleep(0.1)
        while chunk := connection.recv(65536):
            received += chunk
    assert received[: len(status)] == status
    assert bool(received) == bool(status)


def test_the_time_is_for_the_head_alone(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    body = json.dumps(native()).encode()
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.settimeout(30)
        for _ in range(2):
            head = b"%d\r\nContent-Type: application/json\r\n\r\n" % len(body)
            connection.sendall(POST + head)
            time.sleep(0.5)  # a slow body has a bound of its own
            connection.sendall(body)
            assert answered(connection, b'"output_tokens":0}}')
            time.sleep(0.5)  # and so has a connection kept open


def test_the_bound_is_on_one_head_not_on_a_connection(small: Served) -> None:
    with httpx.Client(base_url=small.url, trust_env=False) as client:
        for _ in range(8):
            assert client.post("/v1/decisions", json=native(), headers={"x": "y" * 30_000}).status_code == 200
