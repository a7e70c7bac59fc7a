"""The official clients as they are installed: typesafe-sdk with zstd, and openai; sync and async."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable

import openai
import pytest
import typesafe_sdk
from openai.types.decision_create_params import Question

from sakuradite.http.examples import PIXEL
from tests.http.conftest import API_KEY
from tests.http.serving import MODEL, Served

NOUL = typesafe_sdk.Noul(instructions="Is it about money?")
CHOICE = typesafe_sdk.Choice(instructions="Which?", criteria={"a": "first", "한국어": None})
SCORE = typesafe_sdk.Score(instructions="How much?", criteria=["none", {"label": "some"}, "all"])
QUESTIONS: list[Question] = [
    {"type": "predicate", "instructions": "It is about money.", "name": "money"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "true"}, {"value": True}]},
    {"type": "score", "instructions": "How much?", "levels": [{"label": "none"}, {"label": "all"}]},
]


def test_typesafe_sends_zstd_and_reads_every_type(keyed_server: Served) -> None:
    from typesafe_sdk._core.compression import COMPRESSORS

    assert "zstd" in COMPRESSORS, "the extra typesafe-sdk[zstd] is not installed"
    with typesafe_sdk.TypeSafeClient(api_key=API_KEY, base_url=keyed_server.url) as client:
        result = client.system_one(state="x" * 3000, questions={"q": NOUL, "c": CHOICE, "s": SCORE})
        models = client.models.list().models
    assert result.model == MODEL
    assert 0 <= result.nouls["q"].noul <= 1
    assert result.choices["c"].choice in ("a", "한국어")
    assert result.scores["s"].legend[1] == {"label": "some"}
    assert result.usage.output_tokens == 0
    assert result.request_id.startswith("req_")
    assert {m.name for m in models} >= {MODEL, "jev-latest"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", m.release_date) for m in models)


async def test_typesafe_async(keyed_server: Served) -> None:
    async with typesafe_sdk.AsyncTypeSafeClient(api_key=API_KEY, base_url=keyed_server.url) as client:
        result = await client.system_one(state={"body": "x" * 3000}, questions={"q": NOUL, "c": CHOICE})
    assert list(result.answers) == ["q", "c"]


def test_typesafe_sends_images_as_a_form(scripted: Callable[..., Served]) -> None:
    served = scripted()
    image = typesafe_sdk.Image(base64.b64decode(PIXEL))
    with typesafe_sdk.TypeSafeClient(api_key="x", base_url=served.url) as client:
        client.system_one(state=image, questions={"q": NOUL})
        client.system_one(
            state="look at <photo>, please" + "." * 2000,
            questions={"q": typesafe_sdk.Noul(instructions=["is", image, "red?"])},
            assets={"<photo>": typesafe_sdk.Image(base64.b64decode(PIXEL))},
        )
    first, second = served.gateway.requests
    assert first.state == (0,)
    assert second.state == ("look at ", 0, ", please" + "." * 2000)
    assert second.questions[0].instructions == ('["is","', 1, '","red?"]')
    assert second.images == (base64.b64decode(PIXEL),) * 2


def test_typesafe_shows_the_path_of_a_wrong_field(keyed_server: Served) -> None:
    with typesafe_sdk.TypeSafeClient(api_key=API_KEY, base_url=keyed_server.url) as client:
        with pytest.raises(typesafe_sdk.TypeSafeUnprocessableEntityError, match=r"422 questions\.s\.criteria: "):
            client.system_one(state="x", questions={"s": typesafe_sdk.Score(criteria=["x"] * 11)})
        with pytest.raises(typesafe_sdk.TypeSafeBadRequestError, match="no resident model has this name"):
            client.system_one(state="x", questions={"q": NOUL}, model="nobody")
        with pytest.raises(typesafe_sdk.TypeSafeAPIError, match=r"413 questions\.q: .*8192"):
            client.system_one(state="x" * 9000, questions={"q": NOUL})
    with (
        typesafe_sdk.TypeSafeClient(api_key="wrong", base_url=keyed_server.url) as client,
        pytest.raises(typesafe_sdk.TypeSafeAuthenticationError, match="key"),
    ):
        client.system_one(state="x", questions={"q": NOUL})


def check(decision: openai.types.Decision) -> None:
    predicate, choice, score = decision.answers
    assert predicate.type == "predicate"
    assert predicate.name == "money"
    assert choice.type == "choice"
    assert choice.choice in ("true", True)
    assert [type(p.value) for p in choice.probabilities] == [str, bool]
    assert score.type == "score"
    assert [p.label for p in score.probabilities] == ["none", "all"]
    assert decision.usage.total_tokens == decision.usage.input_tokens > 0


def test_openai(keyed_server: Served) -> None:
    with openai.OpenAI(api_key=API_KEY, base_url=f"{keyed_server.url}/v1") as client:
        check(client.decisions.create(model="default", input="x" * 100, questions=QUESTIONS))
        assert MODEL in [m.id for m in client.models.list()]


async def test_openai_async(keyed_server: Served) -> None:
    async with openai.AsyncOpenAI(api_key=API_KEY, base_url=f"{keyed_server.url}/v1") as client:
        check(await client.decisions.create(model=MODEL, input=[{"role": "user", "content": "x"}], questions=QUESTIONS))


def test_openai_shows_the_path_of_a_wrong_field(keyed_server: Served) -> None:
    with openai.OpenAI(api_key=API_KEY, base_url=f"{keyed_server.url}/v1") as client:
        wrong: Question = {"type": "score", "instructions": "x", "levels": []}
        with pytest.raises(openai.UnprocessableEntityError, match=r"questions\[1\]\.levels: ") as caught:
            client.decisions.create(model="default", input="x", questions=[QUESTIONS[0], wrong])
        assert caught.value.code == "validation_error"
        assert caught.value.param == "questions[1].levels"
        assert caught.value.request_id
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.call_id: "):
            client.decisions.create(
                model="default",
                input=[{"type": "function_call_output", "call_id": "1", "output": "x"}],
                questions=QUESTIONS,
            )
        with pytest.raises(openai.NotFoundError, match="no resident model"):
            client.decisions.create(model="nobody", input="x", questions=QUESTIONS)
    with (
        openai.OpenAI(api_key="wrong", base_url=f"{keyed_server.url}/v1") as client,
        pytest.raises(openai.AuthenticationError, match="key"),
    ):
        client.decisions.create(model="default", input="x", questions=QUESTIONS)
