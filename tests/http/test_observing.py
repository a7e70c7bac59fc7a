"""What an observer of the HTTP application is told, and the route that shows what was counted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from sakuradite.errors import ReplicaUnavailableError
from sakuradite.http.exchange import Exchange
from sakuradite.records import Outcome, RequestRecord
from tests.http.conftest import ADMIN_KEY, API_KEY
from tests.http.serving import MODEL, ScriptedGateway, Served, even, serve

NATIVE = {"model": MODEL, "state": "x", "questions": {"a": {"type": "noul", "instructions": "?"}}}
OPENAI = {"model": "default", "input": "x", "questions": [{"type": "predicate", "instructions": "?"}]}


class Spy:
    """Remembers accounts, and gives every decision a span."""

    def __init__(self) -> None:
        self.began_with: list[str] = []
        self.accounts: list[dict[str, Any]] = []

    def began(self, exchange: Exchange) -> None:
        self.began_with.append(exchange.account.dialect)
        exchange.account.trace = f"span-of-{exchange.id}"

    def ended(self, exchange: Exchange) -> None:
        self.accounts.append(asdict(exchange.account))


async def script(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
    """One answer, then what the state says."""
    yield [even(request, 0)]
    if request.state == ("fail",):
        raise ReplicaUnavailableError("gone")
    if request.state == ("hang",):
        await asyncio.sleep(60)
    for row in range(1, len(request.questions)):
        yield [even(request, row)]


@pytest.fixture
def spied() -> Iterator[tuple[Served, Spy]]:
    with serve(ScriptedGateway(script)) as served:
        spy = Spy()
        served.app.observer = spy
        yield served, spy


def told(served: Served, spy: Spy, number: int = 1) -> list[dict[str, Any]]:
    """The accounts of so many requests; the last may end a moment after its answer has been read."""
    while len(spy.accounts) < number:
        served.call(asyncio.sleep(0.01))
    return spy.accounts


def facts(account: dict[str, Any]) -> dict[str, Any]:
    """An account without its times, which are looked at here."""
    seconds, first = account.pop("seconds"), account.pop("first")
    assert 0 <= first <= seconds
    return account


def test_a_decision_of_each_dialect(spied: tuple[Served, Spy]) -> None:
    served, spy = spied
    for path, body in (("/v1/decisions", NATIVE), ("/v1/decisions", OPENAI), ("/v1/systemone", NATIVE)):
        assert served.client.post(path, json=body, headers={"x-request-id": "r"}).status_code == 200
    assert spy.began_with == ["native", "native", "systemone"]
    common = {
        "model": MODEL, "questions": 1, "images": 0, "input_tokens": 10, "stream": False, "code": "", "status": 200,
        "trace": "span-of-r",
    }  # fmt: skip
    assert [facts(account) for account in told(served, spy, 3)] == [
        {**common, "dialect": "native", "route": "/v1/decisions"},
        {**common, "dialect": "openai", "route": "/v1/decisions"},
        {**common, "dialect": "systemone", "route": "/v1/systemone"},
    ]
    assert {request.trace for request in served.gateway.requests} == {"span-of-r"}


def test_what_is_refused_has_its_code_and_no_name_that_was_sent(spied: tuple[Served, Spy]) -> None:
    served, spy = spied
    served.client.post("/v1/decisions", json={**NATIVE, "model": "sent"})
    served.client.get("/sent")
    served.client.put("/v1/decisions")
    served.client.get("/admin/v1/aliases/sent")
    accounts = told(served, spy, 4)
    assert [(a["dialect"], a["route"], a["model"], a["status"], a["code"]) for a in accounts] == [
        ("native", "/v1/decisions", "", 404, "model_not_found"),
        ("other", "-", "", 404, "not_found"),
        ("native", "-", "", 405, "method_not_allowed"),
        ("admin", "/admin/v1/aliases/{alias}", "", 401, "unauthorized"),
    ]


@pytest.mark.parametrize(("state", "code", "tokens"), [("fine", "", 20), ("fail", "replica_unavailable", 0)])
def test_a_stream_ends_with_the_code_of_its_last_event(
    state: str, code: str, tokens: int, spied: tuple[Served, Spy]
) -> None:
    served, spy = spied
    questions = {"a": {"type": "noul", "instructions": "?"}, "b": {"type": "noul", "instructions": "?"}}
    body = {**NATIVE, "state": state, "stream": True, "questions": questions}
    assert served.client.post("/v1/decisions", json=body).status_code == 200
    (account,) = told(served, spy)
    assert (account["status"], account["code"], account["stream"], account["input_tokens"]) == (200, code, True, tokens)


def test_a_caller_that_goes_away(spied: tuple[Served, Spy]) -> None:
    served, spy = spied
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        body = (
            b'{"model": "%b", "state": "hang", "questions": {"a": {"type": "noul", "instructions": "?"},'
            b' "b": {"type": "noul", "instructions": "?"}}}' % MODEL.encode()
        )
        connection.sendall(
            b"POST /v1/decisions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        while not served.gateway.requests:
            served.call(asyncio.sleep(0.01))
    (account,) = told(served, spy)
    assert (account["status"], account["code"], account["model"]) == (499, "caller_gone", MODEL)


async def page() -> bytes:
    return b"# the figures\n"


def test_metrics_are_for_who_may_decide() -> None:
    with serve(ScriptedGateway(), api_key=API_KEY, admin_key=ADMIN_KEY) as served:
        headers = {"authorization": f"Bearer {API_KEY}"}
        missing = served.client.get("/metrics", headers=headers)
        assert (missing.status_code, missing.json()["error"]["message"]) == (404, "this server keeps no metrics")
        served.app.site.metrics = page
        for key, status in ((API_KEY, 200), (ADMIN_KEY, 401), ("", 401)):
            answer = served.client.get("/metrics", headers={"authorization": f"Bearer {key}"} if key else {})
            assert answer.status_code == status
        answer = served.client.get("/metrics", headers=headers)
        assert answer.content == b"# the figures\n"
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
