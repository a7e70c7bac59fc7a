"""What the SDK refuses before anything is sent, with the field paths that the server uses."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from sakuradite import Choice, Noul, Score, ValidationError
from sakuradite.client.request import decision
from sakuradite.records import Candidate
from tests.client.conftest import QUESTIONS
from tests.http.serving import MODEL, Served
from tests.photographs import REFUSED, TAKEN

NOUL = {"type": "noul", "instructions": "x"}
DEEP: Any = "x"
for _ in range(101):
    DEEP = [DEEP]

WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (3, {"q": NOUL}, "state"),
    (None, {"q": NOUL}, "state"),
    ("x", {}, "questions"),
    ("x", {"": NOUL}, "questions."),
    ("x", {"q": 3}, "questions.q"),
    ("x", {"q": {}}, "questions.q.type"),
    ("x", {"q": {"type": "huh"}}, "questions.q.type"),
    ("x", {"q": NOUL | {"why": "x"}}, "questions.q.why"),
    ("x", {"q": NOUL | {"instructions": 4}}, "questions.q.instructions"),
    ("x", {"q": NOUL | {"criteria": {"maybe": "x"}}}, "questions.q.criteria.maybe"),
    ("x", {"q": {"type": "choice"}}, "questions.q.criteria"),
    ("x", {"q": {"type": "choice", "criteria": {}}}, "questions.q.criteria"),
    ("x", {"q": {"type": "choice", "criteria": {str(i): None for i in range(256)}}}, "questions.q.criteria"),
    ("x", {"q": {"type": "choice", "criteria": {"a": 3}}}, "questions.q.criteria.a"),
    ("x", {"q": {"type": "score", "criteria": ["a", None]}}, "questions.q.criteria[1]"),
    ("x", {"q": {"type": "score", "criteria": {"0": "a"}}}, "questions.q.criteria"),
    ("x", {"a": {"type": "huh"}, "b": NOUL | {"instructions": 4}}, "questions.a.type"),
]


@pytest.mark.parametrize(("state", "questions", "param"), WRONG)
def test_wrong_requests_are_refused_as_the_server_refuses_them(
    server: Served, state: Any, questions: dict[str, Any], param: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        decision(MODEL, state, questions)
    here = {(problem.loc, problem.type) for problem in raised.value.detail}
    body = {"model": MODEL, "state": state, "questions": questions}
    there = httpx.post(f"{server.url}/v1/decisions", json=body, trust_env=False).json()
    assert raised.value.param == there["error"]["param"] == param
    assert {loc for loc, _ in here} == {tuple(problem["loc"]) for problem in there["detail"]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": float("nan")}, "finite"),
        (["x", float("inf")], "finite"),
        (DEEP, "100 levels"),
        ("\ud800", "surrogate"),
        ({1: "x"}, "keys"),
        ({"a": object()}, "object is not a JSON value"),
        (b"x", "text, a JSON object or a JSON list"),
    ],
)
def test_states_that_no_json_can_hold(state: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as raised:
        decision(MODEL, state, QUESTIONS)
    assert raised.value.param is not None
    assert raised.value.param.partition(".")[0].partition("[")[0] == "state"


def test_the_problems_of_all_questions_are_listed() -> None:
    wrong: dict[str, Any] = {"a": {"type": "huh"}, "b": NOUL, "c": {"type": "choice", "criteria": {"x": 1}, "y": 2}}
    with pytest.raises(ValidationError) as raised:
        decision(MODEL, "x", wrong)
    assert [problem.loc[2:] for problem in raised.value.detail] == [
        ("a", "type"),
        ("c", "criteria", "x"),
        ("c", "y"),
    ]


def test_content_that_cannot_be_rendered_is_located() -> None:
    question = Choice(criteria={"a": {"n": float("nan")}, "b": None})
    with pytest.raises(ValidationError) as raised:
        decision(MODEL, "x", {"q": question})
    assert raised.value.param == "questions.q.criteria.a.n"


def test_questions_may_be_models_or_mappings() -> None:
    models = decision(MODEL, "x", QUESTIONS)
    plain = decision(MODEL, "x", {key: question.model_dump() for key, question in QUESTIONS.items()})
    assert models.records == plain.records
    assert models.body(False) == plain.body(False)


def test_the_record_holds_rendered_text_and_candidates() -> None:
    record = decision(MODEL, {"b": 1, "a": 2}, {"q": Score(criteria=["lo", ["hi"]])}, timeout=3).record()
    assert record.state == ('{"b":1,"a":2}',)
    assert record.questions[0].candidates == (Candidate("0", ("lo",)), Candidate("1", ('["hi"]',)))
    assert record.timeout == 3


def test_a_timeout_must_be_above_zero() -> None:
    with pytest.raises(ValidationError, match="timeout: Must be above 0"):
        decision(MODEL, "x", QUESTIONS, timeout=0)


# Images


PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
    b"\x00\x00\x00\nIDATx\x9cc\x00\x01\x00\x00\x05\x00\x01\r\n-\xb4\x00\x00\x00\x00IEND\xaeB`\x82"
)


def test_images_may_be_paths_bytes_or_data_urls(tmp_path: Path) -> None:
    from sakuradite.images import to_data_url

    path = tmp_path / "dot.png"
    path.write_bytes(PNG)
    found = decision(MODEL, "x", {"q": Noul()}, [path, PNG, to_data_url(PNG)])
    assert found.images == (PNG, PNG, PNG)
    assert found.record().state == (0, 1, 2, "x")
    assert found.body(False).count(b"data:image/png;base64,") == 3


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"GIF89a", "not a JPEG or PNG"),
        (PNG[:40], "cut short"),
        ("https://example.org/a.png", "remote URLs are not fetched"),
        ("/etc/passwd", "data URL"),
        (Path("/nonexistent/a.png"), "/nonexistent/a.png: No such file"),
        (b"\x89PNG" + bytes(21 << 20), "at most"),
    ],
)
def test_what_is_no_image_is_refused_by_its_index(image: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as raised:
        decision(MODEL, "x", {"q": Noul()}, [PNG, image])
    assert raised.value.param == "images[1]"


@pytest.mark.parametrize("name", REFUSED)
def test_files_are_refused_as_bytes_as_a_path_and_as_a_data_url(name: str, tmp_path: Path) -> None:
    data, reason = REFUSED[name]
    (path := tmp_path / "image.png").write_bytes(data)
    for image in (data, path, f"data:image/png;base64,{base64.b64encode(data).decode()}"):
        with pytest.raises(ValidationError, match=re.escape(reason)) as raised:
            decision(MODEL, "x", {"q": Noul()}, [PNG, image])
        assert raised.value.param == "images[1]"


def test_files_of_every_kind_are_taken_as_they_are(tmp_path: Path) -> None:
    for data, _, _ in TAKEN.values():
        (path := tmp_path / "image.any").write_bytes(data)
        sent = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        assert decision(MODEL, "x", {"q": Noul()}, [data, path, sent]).images == (data,) * 3


def test_nine_images_are_too_many() -> None:
    with pytest.raises(ValidationError, match="at most 8 items, has 9"):
        decision(MODEL, "x", {"q": Noul()}, [PNG] * 9)


def test_one_image_must_still_be_in_a_list() -> None:
    image: Any = PNG
    with pytest.raises(ValidationError, match="a list of images"):
        decision(MODEL, "x", {"q": Noul()}, image)
