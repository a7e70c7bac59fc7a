"""The System One dialect: leniency at the top, its own limits, assets, and its own error shapes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sakuradite.http.examples import PIXEL
from tests.http.conftest import CHOICE, NOUL, native
from tests.http.serving import MODEL, Served

PNG = base64.b64decode(PIXEL)
INLINE = {"type": "image", "format": "png", "data_base64": PIXEL}


@pytest.fixture
def seeing(scripted: Callable[..., Served]) -> tuple[httpx.Client, Any]:
    served = scripted()
    return served.client, served.gateway


def post(client: httpx.Client, body: Any) -> httpx.Response:
    return client.post("/v1/systemone", json=body)


def test_unknown_fields_at_the_top_are_ignored_and_aliases_resolve(client: httpx.Client) -> None:
    response = post(client, native(model="jev-latest", x_trace=1, seed=7, stream=True))
    assert response.status_code == 200
    assert response.json()["model"] == MODEL
    assert response.headers["content-type"] == "application/json"


def test_numbers_in_ignored_fields_must_be_finite_too(client: httpx.Client) -> None:
    body = json.dumps(native(x=[0])).replace("[0]", "[1e999]")
    response = client.post("/v1/systemone", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", "x", 0]


@pytest.mark.parametrize(
    ("question", "path"),
    [
        ({"type": "noul", "instructions": "x", "y": 1}, ["y"]),
        ({"type": "noul"}, []),
        ({"type": "noul", "criteria": {"true": None}}, []),
        ({"type": "score", "criteria": ["x"] * 11}, ["criteria"]),
        ({"type": "score", "criteria": {"0": "x"}}, ["criteria"]),
        ({"type": "choice", "criteria": dict.fromkeys(map(str, range(256)))}, ["criteria"]),
        ({"type": "box", "instructions": "x"}, ["type"]),
    ],
)
def test_a_wrong_question_is_422_with_detail_alone(client: httpx.Client, question: Any, path: list[str]) -> None:
    response = post(client, native({"q": question}))
    assert response.status_code == 422
    body = response.json()
    assert list(body) == ["detail"]
    assert body["detail"][0]["loc"] == ["body", "questions", "q", *path]
    assert set(body["detail"][0]) == {"loc", "msg", "type"}


def test_an_unknown_model_is_400(client: httpx.Client) -> None:
    response = post(client, native(model="nobody"))
    assert response.status_code == 400
    assert response.json() == {
        "detail": {"error_type": "api_usage_error", "message": "no resident model has this name"}
    }


def test_too_long_is_413_max_tokens_exceeded(client: httpx.Client) -> None:
    response = post(client, native(state="x" * 20_000))
    assert response.status_code == 413
    assert response.json()["detail"]["error_type"] == "max_tokens_exceeded"


def test_a_placeholder_is_replaced_wherever_it_stands_in_a_string(seeing: tuple[httpx.Client, Any]) -> None:
    client, gateway = seeing
    body = native(
        {
            "q": {"type": "noul", "instructions": {"look at": ["<a>", "and <ab> too"]}},
            "c": {"type": "choice", "criteria": {"<a>": "like <a>", "none": None}},
            "s": {"type": "score", "criteria": ["<ab>", "x"]},
        },
        state={"photo": 'before "<a>" after\n<ab>', "<a>": 1},
        assets={"<a>": INLINE, "<ab>": INLINE},
    )
    response = post(client, body)
    assert response.status_code == 200, response.text
    request = gateway.requests[0]
    assert len(request.images) == 2
    assert request.state == ('{"photo":"before \\"', 0, '\\" after\\n', 1, '","<a>":1}')
    noul, choice, score = request.questions
    assert noul.instructions == ('{"look at":["', 0, '","and ', 1, ' too"]}')
    assert choice.candidates[0].name == "<a>"
    assert choice.candidates[0].description == ("like ", 0)
    assert score.candidates[0].description == (1,)
    answer = response.json()["answers"]
    assert answer["s"]["legend"] == {"0": "<ab>", "1": "x"}
    assert list(answer["c"]["probabilities"]) == ["<a>", "none"]


def test_longer_placeholders_win_and_markers_are_left_alone(seeing: tuple[httpx.Client, Any]) -> None:
    client, gateway = seeing
    names = ["1", "<1>", "a", ":", "<"]
    assets = dict.fromkeys(names, INLINE)
    assert post(client, native(state="x<1>1a:<y", assets=assets)).status_code == 200
    assert gateway.requests[0].state == ("x", 1, 0, 2, 3, 4, "y")


def test_many_near_misses_of_a_placeholder_take_no_time(seeing: tuple[httpx.Client, Any]) -> None:
    client, gateway = seeing
    name = "a" * 100_000 + "b"
    response = post(client, native(state="a" * 4_000_000 + name, assets={name: INLINE}))
    assert response.status_code == 200
    assert gateway.requests[0].state == ("a" * 4_000_000, 0)


def test_a_state_that_is_an_image_alone(seeing: tuple[httpx.Client, Any]) -> None:
    client, gateway = seeing
    assert post(client, native(state="<a>", assets={"<a>": INLINE})).status_code == 200
    assert gateway.requests[0].state == (0,)


def form(request: Any, *parts: tuple[str, bytes], first: str = "request") -> tuple[bytes, dict[str, str]]:
    """A multipart body as the SDK writes it."""
    pieces = [(first, "application/json", json.dumps(request).encode())]
    pieces += [(name, "image/png", content) for name, content in parts]
    body = b"".join(
        b'--xYz\r\nContent-Disposition: form-data; name="%b"\r\nContent-Type: %b\r\n\r\n%b\r\n'
        % (name.encode(), kind.encode(), content)
        for name, kind, content in pieces
    )
    return body + b"--xYz--\r\n", {"content-type": "multipart/form-data; boundary=xYz"}


def send(client: httpx.Client, body: bytes, headers: dict[str, str]) -> httpx.Response:
    return client.post("/v1/systemone", content=body, headers=headers)


def test_a_form_brings_images_as_parts(seeing: tuple[httpx.Client, Any]) -> None:
    client, gateway = seeing
    assets = {"<a>": {"type": "image", "part": "asset-1", "data_base64": "ignored"}, "<b>": {"part": "asset-0"}}
    body, headers = form(native(state="<a> <b>", assets=assets), ("asset-0", PNG), ("asset-1", PNG + b""))
    assert send(client, body, headers).status_code == 200
    assert gateway.requests[0].images == (PNG, PNG)
    assert gateway.requests[0].state == (0, " ", 1)


@pytest.mark.parametrize(
    ("state", "assets", "parts"),
    [
        ("no placeholder", {"<a>": {"part": "p"}}, [("p", PNG)]),
        ("<a>", {"<a>": {"part": "p"}}, [("p", PNG), ("q", PNG)]),
        ("<a>", {"<a>": {"part": "p"}}, []),
        ("<a>", {"<a>": {"part": "p"}}, [("p", PNG), ("p", PNG)]),
        ("<a><b>", {"<a>": {"part": "p"}, "<b>": {"part": "p"}}, [("p", PNG)]),
    ],
)
def test_assets_and_parts_must_fit_each_other(
    seeing: tuple[httpx.Client, Any], state: str, assets: Any, parts: list[tuple[str, bytes]]
) -> None:
    response = send(seeing[0], *form(native(state=state, assets=assets), *parts))
    assert response.status_code == 400, response.text
    assert response.json()["detail"]["error_type"] == "api_usage_error"


@pytest.mark.parametrize(
    ("assets", "path"),
    [
        ({}, []),
        ({"": INLINE}, [""]),
        ({"<a>": {"type": "image"}}, ["<a>"]),
        ({"<a>": {"type": "image", "data_base64": PIXEL}}, ["<a>"]),
        ({"<a>": {"type": "image", "format": "gif", "data_base64": PIXEL}}, ["<a>", "format"]),
        ({"<a>": {"type": "image", "format": "png", "data_base64": "!!"}}, ["<a>"]),
        ({f"<{i}>": INLINE for i in range(9)}, []),
    ],
)
def test_a_wrong_asset_is_located(seeing: tuple[httpx.Client, Any], assets: Any, path: list[str]) -> None:
    response = post(seeing[0], native(state="<a>", assets=assets))
    assert response.status_code == 422, response.text
    assert response.json()["detail"][0]["loc"] == ["body", "assets", *path]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--xYz--\r\n",
        b"--other\r\n\r\n",
        form(native())[0][:-10],
        b"--xYz\r\n\r\nno name\r\n--xYz--\r\n",
        form(native(), first="other")[0],
        b"--xYz\r\n" * 100 + b"--xYz--",
    ],
)
def test_a_form_that_is_not_well_made_is_422(client: httpx.Client, body: bytes) -> None:
    response = send(client, body, {"content-type": "multipart/form-data; boundary=xYz"})
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body"]


def test_a_form_needs_a_boundary(client: httpx.Client) -> None:
    assert send(client, form(native())[0], {"content-type": "multipart/form-data"}).status_code == 415


def test_images_need_a_model_that_sees(client: httpx.Client) -> None:
    response = post(client, native(state="<a>", assets={"<a>": INLINE}))
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", "assets"]


def test_several_types_in_one_request(client: httpx.Client) -> None:
    body = post(client, native({"q": NOUL, "c": CHOICE})).json()
    assert [a["type"] for a in body["answers"].values()] == ["noul", "choice"]
    assert all(
        set(a) <= {"type", "noul", "choice", "confidence", "probabilities", "x_label_mass"}
        for a in body["answers"].values()
    )
