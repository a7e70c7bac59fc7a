"""A replica: what it says of each row is what a client says; errors of rows are results, other failures are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from sakuradite.batch import pipeline
from sakuradite.batch.pipeline import Result
from sakuradite.batch.replica import Asked, Replica
from sakuradite.config import ModelConfig
from sakuradite.errors import ModelLoadFailedError, UnsupportedModelError
from tests.batch.conftest import QUESTIONS


def ask(replica: Replica, *rows: bytes, problem: str = "") -> Result:
    """What a replica says of a part."""
    block = pipeline._block(3, 0, list(rows), [problem] * len(rows))
    (result,) = pipeline._results(replica(block))
    return result


@pytest.fixture
def fake(replicas: Callable[..., Replica]) -> Callable[..., Replica]:
    def make(name: str = "fake", column: str | None = "state", **more: Any) -> Replica:
        config = ModelConfig(model=name, backend="fake", **more)
        return replicas(config, "/nowhere", Asked(QUESTIONS, column), None)

    return make


def test_a_row_is_answered_as_jsonl_of_run_has_it(fake: Callable[..., Replica]) -> None:
    result = ask(fake(), b'{"state": "a", "id": 1}')
    fields = orjson.loads(result.fields[0])
    assert list(fields) == ["model", "answers", "usage"]
    assert list(fields["answers"]) == list(QUESTIONS)
    assert fields["usage"] == {"input_tokens": result.tokens, "output_tokens": 0}
    assert (result.part, result.errors) == (3, 0)


def test_company_does_not_change_an_answer_and_order_is_kept(fake: Callable[..., Replica]) -> None:
    rows = [orjson.dumps({"state": f"state {i}"}) for i in range(100)]
    together = ask(fake(), *rows).fields
    assert len(set(together)) == 100
    assert [ask(fake(), row).fields[0] for row in rows[::33]] == together[::33]


def test_the_whole_row_may_be_the_state(fake: Callable[..., Replica]) -> None:
    replica = fake(column=None)
    text, row, number = ask(replica, b'"a"', b'{"b": 2}', b"3").fields
    assert text != row
    assert orjson.loads(number)["error"]["code"] == "validation_error"


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        (b"{broken", "validation_error", "Not valid JSON"),
        (b'{"a": 1}', "validation_error", "state: the row has no such column"),
        (b'["state"]', "validation_error", "state: the row has no such column"),
        (b'{"state": 5}', "validation_error", "state: Input should be text, a JSON object or a JSON list"),
        (b'{"state": null}', "validation_error", "state: Input should be text, a JSON object or a JSON list"),
        (b'{"state": "a", "state": "b"}', "validation_error", "duplicate key"),
        (b'{"state": "' + b"x" * 900 + b'"}', "context_exceeded", "800"),
        (b'{"state": "a poison b"}', "inference_failed", ""),
    ],
)
def test_errors_of_a_row_leave_the_others_alone(
    row: bytes, code: str, message: str, fake: Callable[..., Replica]
) -> None:
    replica = fake("fake?poison=poison", max_input_tokens=800)
    good, bad, other = ask(replica, b'{"state": "a"}', row, b'{"state": "b"}').fields
    assert "answers" in orjson.loads(good)
    assert "answers" in orjson.loads(other)
    error = orjson.loads(bad)["error"]
    assert error["code"] == code
    assert message in error["message"]
    assert b"xxxx" not in bad


def test_a_row_that_could_not_be_read_says_why(fake: Callable[..., Replica]) -> None:
    result = ask(fake(), b'{"state": "a"}', problem="the row has 1 fields and the header 2")
    assert orjson.loads(result.fields[0])["error"]["message"] == "the row has 1 fields and the header 2"
    assert (result.errors, result.tokens) == (1, 0)


def test_what_keeps_a_model_from_loading_ends_the_job_with_its_own_class(fake: Callable[..., Replica]) -> None:
    replica = fake("fake?load_error=model_load_failed")  # raised here, Ray would wrap it and lose its class
    with pytest.raises(ModelLoadFailedError, match="told to fail"):
        ask(replica, b'{"state": "a"}')


def test_a_failure_of_the_reader_passes_through(fake: Callable[..., Replica]) -> None:
    import pickle

    failure = pickle.dumps(UnsupportedModelError("no such thing"))
    with pytest.raises(UnsupportedModelError, match="no such thing"):
        list(pipeline._results(fake()(pipeline._block(-1, 0, [], [], failure))))
