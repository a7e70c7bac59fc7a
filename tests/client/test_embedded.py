"""Embedded clients on a real Ray: the same calls give the same answers as over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sakuradite import AnswerEvent, ClosedError, DecisionResult, ModelConfig, Sakuradite, SyncClient, ValidationError
from sakuradite.errors import ContextExceededError, RequestTimeoutError
from tests.client.conftest import QUESTIONS
from tests.client.test_docs import blocks
from tests.http.serving import Served

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),  # of Ray's own imports
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncClient]:
    """One embedded client for the whole module: a start of Ray takes seconds."""
    config = ModelConfig(model="tiny/fake", backend="fake", max_input_tokens=2000)
    with Sakuradite(config, base_url="", home=tmp_path_factory.mktemp("home")) as client:
        yield client


def test_embedded_and_http_give_the_same(client: SyncClient, server: Served) -> None:
    state = {"text": "The parcel is broken.", "id": 1180591620717411303424}
    here = client.decide(state, QUESTIONS)
    with Sakuradite("tiny/fake", base_url=server.url) as remote:
        there = remote.decide(state, QUESTIONS)
    assert here == there
    assert client.describe().runs == "embedded"


def test_streams(client: SyncClient) -> None:
    whole = client.decide("x", QUESTIONS)
    stream = client.decide("x", QUESTIONS, stream=True)
    events = list(stream)
    assert {event.key for event in events if isinstance(event, AnswerEvent)} == set(QUESTIONS)
    assert events[-1].type == "complete"
    assert stream.result == whole


def test_streams_left_early(client: SyncClient) -> None:
    questions: dict[str, Any] = {f"q{i}": {"type": "noul"} for i in range(100)}
    with client.decide("x", questions, stream=True) as stream:
        next(iter(stream))
    with pytest.raises(ClosedError):
        next(stream)
    assert client.decide("x", QUESTIONS).answers


async def test_coroutines_in_another_loop(client: SyncClient) -> None:
    coroutines = client.coroutines()
    results = await asyncio.gather(*(coroutines.decide("x", QUESTIONS) for _ in range(8)))
    assert all(result == results[0] for result in results)
    async with await coroutines.decide("x", QUESTIONS, stream=True) as stream:
        assert [event.type async for event in stream][-1] == "complete"


def test_many_and_errors_as_values(client: SyncClient) -> None:
    states: list[Any] = ["a", "word " * 3000, {"x": float("nan")}, "d"]
    rows = list(client.decide_many(states, QUESTIONS))
    assert [type(row) for row in rows] == [DecisionResult, ContextExceededError, ValidationError, DecisionResult]
    error = rows[1]
    assert isinstance(error, ContextExceededError)
    assert str(error).startswith("questions.")
    assert error.param is not None
    assert error.param.partition(".")[2] in QUESTIONS


def test_threads(client: SyncClient) -> None:
    results: list[DecisionResult] = []
    threads = [threading.Thread(target=lambda: results.append(client.decide("x", QUESTIONS))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8


def test_too_many_questions_say_the_limit(client: SyncClient) -> None:
    with pytest.raises(ValidationError, match="400"):
        client.decide("x", {f"q{i}": {"type": "noul"} for i in range(401)})


def test_two_clients_at_once_and_closing_one(client: SyncClient, home: Path) -> None:
    slow = ModelConfig(model="tiny/fake?latency=2", backend="fake")
    with Sakuradite(slow, home=home) as other:
        with pytest.raises(RequestTimeoutError):
            other.decide("x", QUESTIONS, timeout=0.5)
        errors: list[BaseException] = []

        def decide() -> None:
            try:
                other.decide("x", QUESTIONS)
            except ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=decide)
        thread.start()
        thread.join(0.5)
        other.close()
        thread.join(30)
        assert [str(error) for error in errors] == ["the client was closed during this call"]
    assert client.decide("x", QUESTIONS).answers  # the other's end is not ours


def test_the_embedded_example_of_the_docs_runs(client: SyncClient, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(embedded=True)
    exec(compile(code.replace('backend="torch"', 'backend="fake"'), "docs/sdk.md", "exec"), {})
    assert '"output_tokens":0' in capsys.readouterr().out
