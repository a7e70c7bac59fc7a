"""The native dialect: what is answered, and how what is wrong is told (sections 2 and 5 of the reported cases)."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sakuradite import answers
from sakuradite.http.examples import PIXEL
from sakuradite.questions import Choice, Noul, Score
from tests.http.conftest import CHOICE, NOUL, SCORE, native
from tests.http.serving import MODEL, Served, even

JSON = {"content-type": "application/json"}


def post(client: httpx.Client, body: Any, path: str = "/v1/decisions") -> httpx.Response:
    """Send a body that may be bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers=JSON)


def first(response: httpx.Response) -> dict[str, Any]:
    """The first problem of a 422."""
    assert response.status_code == 422, response.text
    problem: dict[str, Any] = response.json()["detail"][0]
    return problem


def test_all_three_types_are_answered_as_the_sdk_would_say_it(client: httpx.Client) -> None:
    body = post(client, native({"q": NOUL, "c": CHOICE, "s": SCORE})).json()
    assert list(body) == ["model", "answers", "usage"]
    assert body["model"] == MODEL
    parsed = answers.DecisionResult.model_validate(body)
    assert parsed.model_dump(mode="json") == body
    assert list(body["answers"]) == ["q", "c", "s"]
    choice = parsed.choices["c"]
    p = list(choice.probabilities.values())
    assert choice.choice == max(choice.probabilities, key=choice.probabilities.__getitem__)
    assert choice.confidence == answers.choice_confidence(p)
    score = parsed.scores["s"]
    p = list(score.probabilities.values())
    assert score.legend == {"0": "none", "1": "some", "2": {"label": "all"}}
    assert score.score == answers.expected_score(p)
    assert score.confidence == answers.score_confidence(p)
    assert sum(p) == pytest.approx(1, abs=1e-6)
    assert body["usage"]["output_tokens"] == 0
    assert body["usage"]["input_tokens"] > 0


def test_an_answer_is_what_the_answers_module_makes(scripted: Callable[..., Served]) -> None:
    served = scripted()
    questions = {"q": NOUL, "c": CHOICE, "s": SCORE}
    body = post(served.client, native(questions)).json()
    request = served.gateway.requests[0]
    rows = {i: even(request, i) for i in range(3)}
    models: dict[str, Noul | Choice | Score] = {"q": Noul(**NOUL), "c": Choice(**CHOICE), "s": Score(**SCORE)}
    assert body == answers.result(MODEL, models, rows).model_dump(mode="json")


@pytest.mark.parametrize("state", ["text", "", {"a": [1, {"b": None}]}, ["x", 2, True], {}, []])
def test_a_state_is_text_an_object_or_a_list(client: httpx.Client, state: Any) -> None:
    assert post(client, native(state=state)).status_code == 200


def test_integers_of_any_size_reach_the_prompt_digit_for_digit(scripted: Callable[..., Served]) -> None:
    served = scripted()
    huge = 1180591620717411303424
    level = {"id": huge}
    body = native({"s": {"type": "score", "criteria": ["low", level]}}, state={"id": huge, "z": -(10**400)})
    response = post(served.client, body)
    assert response.status_code == 200
    assert response.json()["answers"]["s"]["legend"]["1"] == level
    (state,) = served.gateway.requests[0].state
    assert state == f'{{"id":{huge},"z":{-(10**400)}}}'


INFINITE = ["body", "questions", "q", "instructions", 0]


@pytest.mark.parametrize(
    ("text", "loc"),
    [
        (b'{"model":"M","state":{"a":NaN},"questions":{}}', ["body", "state", "a"]),
        (b'{"model":"M","state":{"a":1e999},"questions":{}}', ["body", "state", "a"]),
        (b'{"model":"M","state":{"a":[0,-Infinity]},"questions":{}}', ["body", "state", "a", 1]),
        (b'{"model":"M","state":[1' + b"0" * 400 + b'.5],"questions":{}}', ["body", "state", 0]),
        (b'{"model":"M","state":"","questions":{"q":{"type":"noul","instructions":[-1e999]}}}', INFINITE),
    ],
)
def test_numbers_must_be_finite(client: httpx.Client, text: bytes, loc: list[Any]) -> None:
    text = text.replace(b'"questions":{}', b'"questions":{"q":{"type":"noul","instructions":"x"}}')
    for path in ("/v1/decisions", "/v1/systemone"):
        problem = first(post(client, text, path))
        assert (problem["type"], problem["loc"]) == ("finite_number", loc)


def nested(depth: int) -> bytes:
    """A request whose state is so many lists deep."""
    start = b'{"model":"%b","questions":{"q":{"type":"noul"}},"state":' % MODEL.encode()
    return start + b"[" * depth + b"]" * depth + b"}"


def test_a_hundred_levels_pass_and_more_are_refused_with_the_limit(client: httpx.Client) -> None:
    assert post(client, nested(100)).status_code == 200
    for depth in (101, 200, 300, 100_000):
        problem = first(post(client, nested(depth)))
        assert "100 levels" in problem["msg"]
        assert problem["loc"][:2] == ["body", "state"]
    assert first(post(client, nested(500)[:-400]))["loc"][:2] == ["body", "state"]
    assert first(post(client, b"[" * 100_000))["msg"] == "Nested deeper than 100 levels"
    assert post(client, native()).status_code == 200
    deep = b'{"type":"noul","instructions":' + b"[" * 101 + b"]" * 101 + b"}"
    body = json.dumps(native({"q": 0})).encode().replace(b"0", deep)
    assert first(post(client, body))["loc"] == ["body", "questions", "q", "instructions"]


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/systemone"])
def test_duplicate_keys_are_refused_where_they_stand(client: httpx.Client, path: str) -> None:
    question = json.dumps(NOUL)
    body = f'{{"model":"{MODEL}","state":"x","questions":{{"q\\u00e9":{question},"q\\u00e9":{question}}}}}'
    problem = first(post(client, body.encode(), path))
    assert problem["loc"] == ["body", "questions", "qé"]
    assert problem["type"] == "duplicate_key"
    options = '{"model":"M","state":"x","questions":{"q":{"type":"choice","criteria":{"a":null,\n "a":null}}}}'
    problem = first(post(client, options.encode(), path))
    assert problem["loc"] == ["body", "questions", "q", "criteria", "a"]
    assert "duplicate key" in problem["msg"]


@pytest.mark.parametrize("id_", [" ", "a/b", "🎯", "x" * 300, "질문", "0", "a.b[0]", '"', "\u0000"])
def test_ids_come_back_byte_for_byte(client: httpx.Client, id_: str) -> None:
    assert list(post(client, native({id_: NOUL})).json()["answers"]) == [id_]


def test_an_empty_id_is_refused(client: httpx.Client) -> None:
    assert first(post(client, native({"": NOUL})))["loc"] == ["body", "questions", ""]


def test_composed_and_decomposed_names_stay_two_options(client: httpx.Client) -> None:
    names = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    answer = post(client, native({"q": {"type": "choice", "criteria": dict.fromkeys(names)}})).json()["answers"]["q"]
    assert list(answer["probabilities"]) == names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"x"', "JSON object"),
        (b"\xef\xbb\xbf" + json.dumps(native()).encode(), "byte order mark"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b'{"model":"\\ud800 x"}', "surrogate"),
        (b'{"model":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"model":"M"', "Not valid JSON"),
        (b'{"model":"M"}}', "Not valid JSON"),
        (b'{"model":' + b"9" * 5000 + b"}", "4300 digits"),
        (b"\x00", "Not valid JSON"),
    ],
)
def test_what_is_not_a_json_object_is_422_with_detail(client: httpx.Client, content: bytes, message: str) -> None:
    for path in ("/v1/decisions", "/v1/systemone"):
        problem = first(post(client, content, path))
        assert message in problem["msg"]
        assert problem["loc"][0] == "body"


MANY = dict.fromkeys(map(str, range(256)))
WRONG: list[tuple[dict[str, Any], list[Any]]] = [
    ({"model": 5}, ["model"]),
    ({"model": ""}, ["model"]),
    ({"model": None}, ["model"]),
    ({"state": 5}, ["state"]),
    ({"state": None}, ["state"]),
    ({"questions": {}}, ["questions"]),
    ({"questions": []}, ["questions"]),
    ({"questions": {"q": 5}}, ["questions", "q"]),
    ({"questions": {"q": {}}}, ["questions", "q", "type"]),
    ({"questions": {"q": {"type": "box"}}}, ["questions", "q", "type"]),
    ({"questions": {"q": {"type": "noul", "instructions": 5}}}, ["questions", "q", "instructions"]),
    ({"questions": {"q": {"type": "noul", "criteria": {"true": 5}}}}, ["questions", "q", "criteria", "true"]),
    ({"questions": {"q": {"type": "noul", "criteria": {"yes": "x"}}}}, ["questions", "q", "criteria", "yes"]),
    ({"questions": {"q": {"type": "noul", "instruction": "x"}}}, ["questions", "q", "instruction"]),
    ({"questions": {"q": {"type": "choice"}}}, ["questions", "q", "criteria"]),
    ({"questions": {"q": {"type": "choice", "criteria": {}}}}, ["questions", "q", "criteria"]),
    ({"questions": {"q": {"type": "choice", "criteria": ["a"]}}}, ["questions", "q", "criteria"]),
    ({"questions": {"q": {"type": "choice", "criteria": {"a": 1}}}}, ["questions", "q", "criteria", "a"]),
    ({"questions": {"q": {"type": "choice", "criteria": MANY}}}, ["questions", "q", "criteria"]),
    ({"questions": {"q": {"type": "score", "criteria": []}}}, ["questions", "q", "criteria"]),
    ({"questions": {"q": {"type": "score", "criteria": {"0": "a"}}}}, ["questions", "q", "criteria"]),
    ({"questions": {"q": {"type": "score", "criteria": ["a", None]}}}, ["questions", "q", "criteria", 1]),
    ({"questions": {"q": {"type": "score", "criteria": ["a"] * 256}}}, ["questions", "q", "criteria"]),
    ({"questions": {str(i): NOUL for i in range(401)}}, ["questions"]),
    ({"stream": 1}, ["stream"]),
    ({"stream": "true"}, ["stream"]),
    ({"images": "x"}, ["images"]),
    ({"images": [5]}, ["images", 0]),
    ({"images": ["data:image/png;base64,AAAA"] * 9}, ["images"]),
    ({"images": ["data:image/png;base64,AAAA"]}, ["images", 0]),
    ({"images": ["http://example.org/x.png"]}, ["images", 0]),
    ({"quesitons": {}}, ["quesitons"]),
    ({"input": "x"}, ["input"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path"), WRONG, ids=[str(w[1]) + str(i) for i, w in enumerate(WRONG)])
def test_a_wrong_field_is_located(client: httpx.Client, changes: dict[str, Any], path: list[Any]) -> None:
    response = post(client, native(**changes))
    problem = first(response)
    assert problem["loc"] == ["body", *path]
    error = response.json()["error"]
    assert error["code"] == "validation_error"
    assert error["message"].startswith(f"{error['param']}: ")
    for part in path:
        assert str(part) in error["param"]


def test_missing_fields_are_all_listed(client: httpx.Client) -> None:
    problems = post(client, {}).json()["detail"]
    assert [p["loc"] for p in problems] == [["body", "model"], ["body", "state"], ["body", "questions"]]


def test_a_long_list_of_problems_is_cut(client: httpx.Client) -> None:
    body = post(client, native({str(i): {"type": "noul", "instructions": 1} for i in range(400)})).json()
    assert len(body["detail"]) == 50
    assert "and 397 more" in body["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "count"), [("choice", 1), ("choice", 2), ("choice", 255), ("score", 1), ("score", 255)]
)
def test_the_limits_of_candidates_are_answered(client: httpx.Client, kind: str, count: int) -> None:
    criteria: Any = {f"o{i}": None for i in range(count)} if kind == "choice" else [f"l{i}" for i in range(count)]
    answer = post(client, native({"q": {"type": kind, "criteria": criteria}})).json()["answers"]["q"]
    assert len(answer["probabilities"]) == count
    assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-6)
    if count == 1:
        assert answer["confidence"] == 1


@pytest.mark.parametrize(
    "question",
    [
        {"type": "noul"},
        {"type": "noul", "instructions": None, "criteria": None},
        {"type": "noul", "criteria": {"true": "x"}},
        {"type": "noul", "criteria": {"false": {"x": 1}}},
        {"type": "choice", "criteria": {"a": None}},
        {"type": "choice", "instructions": {"task": "x"}, "criteria": {"": "empty name", "b": [1]}},
    ],
)
def test_optional_parts_may_be_left_out(client: httpx.Client, question: dict[str, Any]) -> None:
    assert post(client, native({"q": question})).status_code == 200


def test_an_unknown_model_is_404_and_one_on_its_way_503(scripted: Callable[..., Served]) -> None:
    served = scripted()
    served.gateway.loading.add("soon")
    response = post(served.client, native(model="nobody"))
    assert response.status_code == 404
    assert response.json()["error"] == {
        "code": "model_not_found",
        "message": "no resident model has this name",
        "type": "invalid_request_error",
        "param": "model",
    }
    response = post(served.client, native(model="soon"))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "4"


def test_images_need_a_model_that_sees(client: httpx.Client, scripted: Callable[..., Served]) -> None:
    image = f"data:image/png;base64,{PIXEL}"
    response = post(client, native(images=[image]))
    assert response.status_code == 422
    body = response.json()
    assert body["error"]["code"] == "unsupported_model"
    assert body["error"]["message"] == f"images: images not supported by {MODEL}"
    assert body["detail"][0]["loc"] == ["body", "images"]
    served = scripted()
    assert post(served.client, native(images=[image, image], state="look")).status_code == 200
    request = served.gateway.requests[0]
    assert request.state == (0, 1, "look")
    assert len(request.images) == 2
    assert request.images[0].startswith(b"\x89PNG")


def test_a_question_over_the_context_says_which_and_both_numbers(client: httpx.Client) -> None:
    response = post(client, native({"short": NOUL, "long": {"type": "noul", "instructions": "x" * 9000}}))
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["code"] == "context_exceeded"
    assert error["param"] == "questions.long"
    assert "8192" in error["message"]
    assert "questions.long" in error["message"]
