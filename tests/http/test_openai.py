"""The OpenAI Decisions dialect, told apart by its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sakuradite.http.examples import PIXEL
from tests.http.conftest import openai
from tests.http.serving import MODEL, Served

IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "low"}
TEXT = {"type": "input_text", "text": "hello", "prompt_cache_breakpoint": {"mode": "explicit"}}
PREDICATE = {"type": "predicate", "instructions": "x"}


def ask(served: Served, **changes: Any) -> httpx.Response:
    return served.client.post("/v1/decisions", json=openai(**changes))


def user(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def choice(values: list[Any]) -> dict[str, Any]:
    return {"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": v} for v in values]}]}


def score(levels: list[Any]) -> dict[str, Any]:
    return {"questions": [{"type": "score", "instructions": "x", "levels": levels}]}


def test_answers_come_in_order_with_all_their_fields(open_server: Served) -> None:
    questions = [
        {"type": "predicate", "name": "same", "instructions": "x"},
        {
            "type": "choice",
            "name": "same",
            "instructions": [TEXT | {"prompt_cache_breakpoint": None}],
            "choices": [{"value": "true"}, {"value": True, "description": "yes"}, {"value": "b"}],
        },
        {"type": "score", "instructions": "x", "levels": [{"label": "a"}, {"label": "a", "description": "d"}]},
    ]
    response = ask(
        open_server,
        questions=questions,
        prompt_cache_key="k",
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        safety_identifier="s",
        stream=False,
    )
    assert response.status_code == 200, response.text
    body = response.json()
    predicate, chosen, scored = body["answers"]
    assert list(predicate) == ["type", "name", "probability"]
    assert chosen["name"] == "same"
    values = [p["value"] for p in chosen["probabilities"]]
    assert [(type(value), value) for value in values] == [(str, "true"), (bool, True), (str, "b")]
    assert chosen["choice"] in ("true", True, "b")
    assert scored["name"] is None
    assert [(p["value"], p["label"]) for p in scored["probabilities"]] == [(0, "a"), (1, "a")]
    assert body["usage"] == {
        "input_tokens": body["usage"]["input_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": body["usage"]["input_tokens"],
    }


def test_a_conversation_becomes_one_text_with_images_in_place(scripted: Callable[..., Served]) -> None:
    served = scripted()
    response = ask(
        served,
        input=[
            {"role": "system", "content": "be brief"},
            {"type": "message", "role": "user", "content": [TEXT, IMAGE, {"type": "input_json", "data": {"n": 2**70}}]},
            {"role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "so"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}, IMAGE]},
            {"type": "custom_tool_call", "call_id": "1", "name": "g", "input": "in", "namespace": "n", "id": "i"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "out"},
        ],
        questions=[{"type": "predicate", "instructions": [IMAGE, TEXT | {"prompt_cache_breakpoint": None}]}],
    )
    assert response.status_code == 200, response.text
    request = served.gateway.requests[0]
    assert request.state == (
        "system: be brief\n\nuser: hello\n",
        0,
        f'\n{{"n":{2**70}}}\n\nassistant: so\n\nassistant: no\n\ncall f (1): {{}}\n\nresult (1): r\n',
        1,
        "\n\ncall g (1): in\n\nresult (1): out",
    )
    assert request.questions[0].instructions == (2, "\nhello")
    assert len(request.images) == 3


def test_a_lone_user_message_is_read_like_plain_text(scripted: Callable[..., Served]) -> None:
    served = scripted()
    for given in ("hello", [{"role": "user", "content": "hello"}], [{"role": "user", "content": [TEXT]}]):
        assert ask(served, input=given).status_code == 200
    assert [r.state for r in served.gateway.requests] == [("hello",)] * 3


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 1}, "temperature"),
        ({"questions": [PREDICATE | {"zz": 1}]}, "questions[0].zz"),
        ({"input": [{"role": "user", "content": "x", "zz": 1}]}, "input[0].zz"),
        (user(IMAGE | {"image_url": "https://e.org/x.png"}), "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call_output", "call_id": "9", "output": "x"}]}, "input[0].call_id"),
        (
            {
                "input": [
                    {"type": "custom_tool_call_output", "call_id": "1", "output": "x"},
                    {"type": "custom_tool_call", "call_id": "1", "name": "g", "input": "in"},
                ]
            },
            "input[0].call_id",
        ),
        (
            {
                "input": [
                    {"type": "custom_tool_call", "call_id": "1", "name": "g", "input": "in"},
                    {"type": "function_call_output", "call_id": "1", "output": "x"},
                ]
            },
            "input[1].call_id",
        ),
    ],
)  # fmt: skip
def test_what_this_server_does_not_do_is_400(open_server: Served, changes: dict[str, Any], param: str) -> None:
    response = ask(open_server, **changes)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert list(response.json()) == ["error"]
    assert (error["code"], error["param"]) == ("invalid_request", param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": 1}, "model"),
        ({"input": 5}, "input"),
        ({"stream": 0}, "stream"),
        ({"stream": "yes"}, "stream"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "system", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "noul"}]}, "questions[0].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        (choice([]), "questions[0].choices"),
        (choice([1]), "questions[0].choices[0].value"),
        (choice(["a", "a"]), "questions[0]"),
        (choice([str(i) for i in range(256)]), "questions[0].choices"),
        (score([{"label": "a"}] * 256), "questions[0].levels"),
        (score([{}]), "questions[0].levels[0].label"),
        ({"input": [{"role": "user", "content": [IMAGE] * 9}]}, "input[0].content[8].image_url"),
        (user(IMAGE | {"image_url": "data:image/png;base64,AAAA"}), "input[0].content[0].image_url"),
        (user({"type": "input_json", "data": [1]}), "input[0].content[0].data[0]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_422_with_its_path(open_server: Served, changes: dict[str, Any], param: str) -> None:
    response = ask(open_server, **changes)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "body",
    [
        {"model": MODEL, "input": "x"},
        {"model": MODEL, "input": "x", "questions": {"q": {"type": "noul"}}},
        {"model": MODEL, "state": "x", "questions": [PREDICATE]},
        {"model": MODEL, "questions": [PREDICATE]},
    ],
)
def test_neither_shape_is_422(client: httpx.Client, body: dict[str, Any]) -> None:
    assert client.post("/v1/decisions", json=body).status_code == 422


def test_one_option_is_certain(open_server: Served) -> None:
    question = {"type": "choice", "instructions": "x", "choices": [{"value": False}]}
    (answer,) = ask(open_server, questions=[question]).json()["answers"]
    assert (answer["choice"], answer["confidence"]) == (False, 1)
