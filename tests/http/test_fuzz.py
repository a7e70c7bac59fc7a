"""Bodies that nobody would write: nothing but documented answers in the dialect's own shape, and the worker lives."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sakuradite.config import ServerConfig
from sakuradite.http.app import App
from sakuradite.http.openapi import document
from sakuradite.http.routes import ROUTES
from tests.http.conftest import CHOICE, NOUL, SCORE, native, openai
from tests.http.serving import MODEL, FakeAdministration, ScriptedGateway

DOCUMENT = document(ROUTES, False)
LIMIT = 1 << 16

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**63, max_value=10**40),
    st.floats(),  # NaN and infinities too
    st.text(max_size=20),
    st.sampled_from(
        ["noul", "choice", "score", "input_text", "user", "data:image/png;base64,", "\ud800", "\x00", "a" * 300]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
VALID: list[dict[str, Any]] = [
    native({"q": NOUL, "c": CHOICE, "s": SCORE}),
    native({"q": NOUL}, stream=True),
    native({"q": NOUL}, images=["data:image/png;base64,AAAA"]),
    native({"q": NOUL}, state="<a>", assets={"<a>": {"type": "image", "format": "png", "data_base64": "AAAA"}}),
    openai(),
    openai(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_json", "data": {}}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        questions=[
            {"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": True}]},
            {"type": "score", "instructions": "x", "levels": [{"label": "a"}]},
        ],
    ),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as a container and a key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    found = [(value, key) for key in keys]
    for key in keys:
        found += places(value[key])
    return found


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid body with something replaced, removed or added, sometimes with a byte changed."""
    body = json.loads(json.dumps(draw(st.sampled_from(VALID))))
    for _ in range(draw(st.integers(0, 3))):
        at = places(body)
        if not at:
            break
        container, key = draw(st.sampled_from(at))
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "replace":
            container[key] = draw(values)
        elif action == "remove":
            del container[key]
        elif isinstance(container, dict):
            container[draw(st.text(max_size=5))] = draw(values)
        else:
            container.append(draw(values))
    text = bytearray(json.dumps(body).encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    return bytes(text)


bodies = st.one_of(mutated(), values.map(lambda v: json.dumps(v).encode()), st.binary(max_size=60))
FORM = b"multipart/form-data; boundary=b"
HEADERS = st.fixed_dictionaries(
    {
        b"content-type": st.sampled_from(
            [b"application/json"] * 8 + [b"", b"text/plain", b"multipart/form-data; boundary=b"]
        ),
        b"content-encoding": st.sampled_from([b"identity"] * 8 + [b"gzip", b"zstd", b"br"]),
    }
)


def send(
    app: App, path: str, body: bytes, headers: dict[bytes, bytes], pieces: int
) -> tuple[int, dict[bytes, bytes], bytes]:
    """The answer to a request, its body sent in pieces."""
    step = max(1, -(-len(body) // pieces))
    chunks = [body[i : i + step] for i in range(0, len(body), step)] or [b""]
    incoming = [{"type": "http.request", "body": c, "more_body": i < len(chunks) - 1} for i, c in enumerate(chunks)]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def collect(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"host", b"localhost"), *headers.items()],
        "client": ("127.0.0.1", 1),
    }
    asyncio.run(app(scope, receive, collect))
    start, *rest = sent
    return start["status"], dict(start["headers"]), b"".join(m.get("body", b"") for m in rest)


APP = App(ServerConfig(max_request_bytes=LIMIT), ScriptedGateway(), FakeAdministration())


def check(path: str, body: bytes, headers: dict[bytes, bytes], pieces: int) -> int:
    """Send a body and judge the answer."""
    status, sent, answer = send(APP, path, body, headers, pieces)
    assert status < 500, answer
    assert str(status) in DOCUMENT["paths"][path]["post"]["responses"]
    assert sent[b"x-request-id"]
    if status == 200 and sent[b"content-type"].startswith(b"text/event-stream"):
        assert b"event: complete\n" in answer
        return status
    value = json.loads(answer)
    if status == 200:
        assert set(value) == {"model", "answers", "usage"}
        assert value["model"] == MODEL
    elif status == 422:
        assert value["detail"]
        for problem in value["detail"]:
            assert set(problem) == {"loc", "msg", "type"}
            assert problem["loc"][0] == "body"
            assert problem["msg"]
        assert ("error" in value) == (path == "/v1/decisions")
    elif path == "/v1/systemone":
        assert set(value["detail"]) == {"error_type", "message"}
    else:
        assert set(value["error"]) == {"code", "message", "type", "param"}
    assert APP.site.admission.requests == APP.site.admission.bytes == 0
    return status


def encoded(body: bytes, headers: dict[bytes, bytes]) -> bytes:
    """The body in the encoding of its headers, where that is gzip."""
    if headers[b"content-encoding"] == b"gzip":
        pack = zlib.compressobj(wbits=31)
        return pack.compress(body) + pack.flush()
    return body


PATHS = st.sampled_from(["/v1/decisions", "/v1/systemone"])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=PATHS, body=bodies, headers=HEADERS, pieces=st.integers(1, 3))
def test_only_documented_answers(path: str, body: bytes, headers: dict[bytes, bytes], pieces: int) -> None:
    check(path, encoded(body, headers), headers, pieces)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=PATHS, body=bodies, headers=HEADERS, pieces=st.integers(1, 3))
def test_only_documented_answers_for_long(path: str, body: bytes, headers: dict[bytes, bytes], pieces: int) -> None:
    check(path, encoded(body, headers), headers, pieces)


def test_the_valid_bodies_are_valid() -> None:
    headers = {b"content-type": b"application/json", b"content-encoding": b"identity"}
    found = [
        [check(path, json.dumps(body).encode(), headers, 1) for body in VALID]
        for path in ("/v1/decisions", "/v1/systemone")
    ]
    assert found == [[200, 200, 422, 422, 200, 200], [200, 200, 200, 422, 422, 422]]
