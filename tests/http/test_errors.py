"""Every code of the contract in each dialect's own shape, its headers, and how often the official clients send it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import openai as openai_sdk
import pytest
import typesafe_sdk

from sakuradite.errors import APIError, ErrorRecord, FieldProblem, error_from_code
from sakuradite.http.examples import PIXEL
from sakuradite.records import Outcome, RequestRecord, RowFailure
from tests.http.conftest import ADMIN_KEY, NOUL, native, openai
from tests.http.serving import FakeAdministration, ScriptedGateway, Served, even, serve

CODES = {kind.code: kind for kind in APIError.__subclasses__()}
# what no client may be told to send again
IMPOSSIBLE = sorted(code for code, kind in CODES.items() if kind.status < 500 and not kind.retryable)
SYSTEM_ONE = {
    401: "authentication_error", 413: "max_tokens_exceeded", 429: "rate_limit_error", 500: "api_error",
    502: "api_error", 503: "overloaded_error", 504: "timeout_error", 507: "api_error",
}  # fmt: skip


class Failing(ScriptedGateway):
    """Fails every request with the code that its state names; "row" in front makes it a failure of the second row."""

    def __init__(self) -> None:
        super().__init__(self._fail)
        self.seen = 0

    async def _fail(self, request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        self.seen += 1
        where, _, code = str(request.state[0]).partition(" ")
        error = error_from_code(code, "told to fail", retry_after=2.5 if CODES[code].status in (429, 503) else None)
        if where == "row":
            yield [even(request, 0)]
            yield [RowFailure(1, error.record())]
        raise error
        yield []


@pytest.fixture(scope="module")
def failing() -> Iterator[Served]:
    with serve(Failing(), admin_key=ADMIN_KEY) as served:
        yield served


@pytest.fixture
def caller(failing: Served) -> httpx.Client:
    return failing.client


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_in_the_native_and_the_openai_dialect(caller: httpx.Client, code: str) -> None:
    kind = CODES[code]
    for body in (native(state=f"all {code}"), openai(input=f"all {code}")):
        response = caller.post("/v1/decisions", json=body)
        assert response.status_code == kind.status
        assert response.headers["content-type"] == "application/json"
        answer = response.json()
        assert set(answer) == ({"error", "detail"} if kind.status == 422 else {"error"})
        assert set(answer["error"]) == {"code", "message", "type", "param"}
        assert answer["error"]["code"] == code
        assert answer["error"]["message"] == "told to fail"
        if kind.status == 422:
            assert answer["detail"] == [{"loc": ["body"], "msg": "told to fail", "type": code}]
        check_headers(response, kind)


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_in_the_system_one_dialect(caller: httpx.Client, code: str) -> None:
    kind = CODES[code]
    response = caller.post("/v1/systemone", json=native(state=f"all {code}"))
    status = 400 if code == "model_not_found" else kind.status
    assert response.status_code == status
    answer = response.json()
    assert list(answer) == ["detail"]
    if status == 422:
        assert answer["detail"] == [{"loc": ["body"], "msg": "told to fail", "type": code}]
    else:
        expected = SYSTEM_ONE.get(status, "api_usage_error")
        assert answer["detail"] == {"error_type": expected, "message": "told to fail"}
    check_headers(response, kind)


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_of_administration(code: str, failing: Served) -> None:
    failing.administration.error = error_from_code(code, "told to fail")
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    listed = failing.client.get("/admin/v1/models", headers=headers)
    loaded = failing.client.post("/admin/v1/models/load", json={"model": "x"}, headers=headers)
    for response in (listed, loaded):
        assert response.status_code == CODES[code].status
        assert response.json()["error"]["code"] == code
        check_headers(response, CODES[code])


def check_headers(response: httpx.Response, kind: type[APIError]) -> None:
    """What goes with a status."""
    assert ("www-authenticate" in response.headers) == (kind.status == 401)
    waiting_helps = kind.status == 429 or (kind.status == 503 and kind.retryable)
    assert ("retry-after" in response.headers) == waiting_helps
    if waiting_helps:
        assert int(response.headers["retry-after"]) >= 1
    assert response.headers["x-request-id"] == response.headers["x-typesafe-request-id"]


def test_a_failed_row_names_its_question(caller: httpx.Client) -> None:
    questions = {"first": NOUL, "second": NOUL}
    error = caller.post("/v1/decisions", json=native(questions, state="row context_exceeded")).json()["error"]
    assert error["param"] == "questions.second"
    assert error["message"] == "questions.second: told to fail"
    response = caller.post("/v1/systemone", json=native(questions, state="row unsupported_model"))
    assert response.json() == {
        "detail": [{"loc": ["body", "questions", "second"], "msg": "told to fail", "type": "unsupported_model"}]
    }
    two = [{"type": "predicate", "instructions": "x"}] * 2
    error = caller.post("/v1/decisions", json=openai(input="row context_exceeded", questions=two)).json()["error"]
    assert error["param"] == "questions[1]"


def test_the_place_of_a_row_goes_in_front_of_the_engines_own(scripted: Callable[..., Served]) -> None:
    async def script(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        detail = (FieldProblem(("body", "criteria", 2), "no label", "labels"),)
        yield [RowFailure(0, ErrorRecord("unsupported_model", 422, "no label", "criteria[2]", detail))]

    served = scripted(script)
    answer = served.client.post("/v1/decisions", json=native()).json()
    assert answer["detail"][0]["loc"] == ["body", "questions", "q", "criteria", 2]
    assert answer["error"]["param"] == "questions.q.criteria[2]"


UNKNOWN = ["/", "/v1", "/v1/decisions/", "/v1//decisions", "/V1/decisions", "/docs/", "/favicon.ico", "/v1/models/x"]


@pytest.mark.parametrize("path", [*UNKNOWN, "/admin/v1/operations/", "/admin/v1/operations/a/b"])
def test_an_unknown_route_is_404_and_never_a_redirect(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST", "HEAD"):
        response = client.request(method, path)
        assert response.status_code == 404
        assert "location" not in response.headers
        if method != "HEAD":
            assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/decisions", "POST"),
        ("GET", "/v1/systemone", "POST"),
        ("HEAD", "/v1/models", "GET"),
        ("OPTIONS", "/v1/models", "GET"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PATCH", "/admin/v1/models", "DELETE, GET"),
        ("POST", "/admin/v1/aliases/x", "DELETE, GET, PUT"),
        ("DELETE", "/admin/v1/operations/x", "GET"),
        ("TRACE", "/docs", "GET"),
    ],
)
def test_a_wrong_method_is_405_with_allow(client: httpx.Client, method: str, path: str, allow: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allow
    assert "x-request-id" in response.headers
    if path == "/v1/systemone":
        assert response.json()["detail"]["error_type"] == "api_usage_error"


def test_request_ids_are_made_or_kept(client: httpx.Client) -> None:
    for name in ("x-request-id", "x-typesafe-request-id"):
        for sent in ("abc", "A.b_c:d-9", "x" * 128):
            response = client.get("/healthz", headers={name: sent})
            assert response.headers["x-request-id"] == response.headers["x-typesafe-request-id"] == sent
        for refused in (b"x" * 129, b"a b", b"a/b", b"\xc3\xa9"):
            made = client.get("/healthz", headers=[(name.encode(), refused)]).headers["x-request-id"]
            assert made.startswith("req_")
    ids = {client.get("/healthz").headers["x-request-id"] for _ in range(20)}
    assert len(ids) == 20


def test_two_requests_with_one_id_are_two_to_the_model(scripted: Callable[..., Served]) -> None:
    served = scripted()
    for _ in range(2):
        served.client.post("/v1/decisions", json=native(), headers={"x-request-id": "same"})
    first, second = served.gateway.requests
    assert first.id != second.id
    assert first.id.startswith("same/")


SECRET = "tell-nobody-4471"


def test_nothing_of_a_request_is_in_errors_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def crash(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        raise RuntimeError(request.state[0])
        yield []

    bodies: list[bytes | dict[str, Any]] = [
        native(state=5, model=SECRET),
        native({"q": {"type": SECRET}}),
        native({"q": {"type": "noul", "instructions": 1, "criteria": SECRET}}),
        native({"q": {"type": "choice", "criteria": {"a": None, "b": 5}}}, state=SECRET, stream=SECRET),
        native(images=[SECRET]),
        native(images=[f"data:image/png;base64,{SECRET}"]),
        native(images=[f"data:image/{SECRET};base64,{PIXEL}"]),
        f'{{"state": "{SECRET}'.encode(),
        f'{{"state": "{SECRET}" "x"}}'.encode(),
        f'{{"state": "{SECRET}\\ud800"}}'.encode(),
        SECRET.encode(),
        openai(input=[{"role": SECRET, "content": SECRET}]),
        openai(input=[{"role": "user", "content": [{"type": "input_image", "image_url": f"https://{SECRET}"}]}]),
        openai(input=[{"type": "function_call_output", "call_id": SECRET, "output": SECRET}]),
    ]
    with serve(ScriptedGateway(crash)) as crashing:
        other = crashing.client
        responses = [other.post(path, json=native(state=SECRET)) for path in ("/v1/decisions", "/v1/systemone")]
        assert [r.status_code for r in responses] == [500, 500]
        responses += [other.post("/v1/decisions", json=native(state=SECRET, stream=True))]
        for body in bodies:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            for path in ("/v1/decisions", "/v1/systemone"):
                headers = {"content-type": "application/json", "authorization": f"Bearer {SECRET}"}
                response = other.post(path, headers=headers, **content)
                assert path == "/v1/systemone" or 400 <= response.status_code < 500, response.text
                responses.append(response)
        other.get(f"/{SECRET}?{SECRET}=1")
    assert not [r.text for r in responses if SECRET in r.text]
    ours = [r for r in caplog.records if not r.name.startswith("http")]  # the test's own client logs its URLs
    logged = "\n".join(caplog.handler.format(r) for r in ours)
    assert SECRET not in logged
    assert "RuntimeError" in logged, "a defect is logged with its type and place"


QUESTIONS: list[Any] = [{"type": "predicate", "instructions": "x"}]


type Clients = tuple[typesafe_sdk.TypeSafeClient, openai_sdk.OpenAI]


@pytest.fixture(scope="module")
def clients(failing: Served) -> Iterator[Clients]:
    with (
        typesafe_sdk.TypeSafeClient(api_key="x", base_url=failing.url) as system_one,
        openai_sdk.OpenAI(api_key="x", base_url=f"{failing.url}/v1") as client,
    ):
        yield system_one, client


@pytest.mark.parametrize("code", sorted(CODES))
def test_how_often_the_official_clients_send(
    failing: Served, clients: Clients, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once what can never succeed; three times what may. System One's client repeats every 5xx, whatever it is told."""
    monkeypatch.setattr("time.sleep", lambda _: None)  # their pauses in between are not what is tested
    kind, gateway = CODES[code], failing.gateway
    system_one, client = clients
    gateway.seen = 0
    noul = typesafe_sdk.Noul(instructions="x")
    with pytest.raises(typesafe_sdk.TypeSafeAPIError, match="told to fail") as caught:
        system_one.system_one(state=f"all {code}", questions={"q": noul}, model="default")
    assert caught.value.request_id
    assert gateway.seen == (3 if kind.retryable or kind.status >= 500 else 1)
    gateway.seen = 0
    with pytest.raises(openai_sdk.APIStatusError, match="told to fail"):
        client.decisions.create(model="default", input=f"all {code}", questions=QUESTIONS)
    assert gateway.seen == (3 if kind.retryable else 1)


@pytest.mark.parametrize("code", IMPOSSIBLE)
async def test_the_async_clients_send_an_impossible_request_once(failing: Served, code: str) -> None:
    gateway = failing.gateway
    gateway.seen = 0
    noul = typesafe_sdk.Noul(instructions="x")
    async with typesafe_sdk.AsyncTypeSafeClient(api_key="x", base_url=failing.url) as system_one:
        with pytest.raises(typesafe_sdk.TypeSafeAPIError, match="told to fail"):
            await system_one.system_one(state=f"all {code}", questions={"q": noul}, model="default")
    assert gateway.seen == 1
    async with openai_sdk.AsyncOpenAI(api_key="x", base_url=f"{failing.url}/v1") as client:
        with pytest.raises(openai_sdk.APIStatusError, match="told to fail"):
            await client.decisions.create(model="default", input=f"all {code}", questions=QUESTIONS)
    assert gateway.seen == 2


def test_a_refused_load_is_an_error_of_its_own() -> None:
    administration = FakeAdministration(error=error_from_code("invalid_lifecycle", "resident with another dtype"))
    with serve(ScriptedGateway(), administration, admin_key=ADMIN_KEY) as served:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        response = httpx.post(
            f"{served.url}/admin/v1/models/load", json={"model": "x"}, headers=headers, trust_env=False
        )
    assert response.status_code == 409
    assert response.json()["error"]["message"] == "resident with another dtype"
