"""The shortest token queue: which replica a request goes to."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from sakuradite.cluster.balance import TokenQueues, tokens_of
from sakuradite.cluster.calls import ModelCalls, _Ticket
from sakuradite.cluster.embedded import EmbeddedModel
from sakuradite.cluster.handles import running_replicas
from sakuradite.config import ModelConfig
from sakuradite.errors import ReplicaUnavailableError
from sakuradite.records import RequestRecord, RowAnswer, pack_request
from tests.cluster.asking import answers, outcomes, request


def test_a_long_request_keeps_others_away_until_it_is_answered() -> None:
    queues = TokenQueues()
    long = queues.choose(["a", "b"], 1000)
    other = "b" if long == "a" else "a"
    assert [queues.choose(["a", "b"], 300) for _ in range(4)] == [other] * 4
    assert queues.choose(["a", "b"], 300) == long
    queues.answered(other, 1200)
    assert queues.choose(["a", "b"], 10) == other


def test_equal_queues_are_shared_out_and_a_new_replica_is_empty() -> None:
    queues = TokenQueues()
    assert Counter(queues.choose(["a", "b", "c"], 10) for _ in range(30)) == {"a": 10, "b": 10, "c": 10}
    assert [queues.choose(["a", "d"], 10) for _ in range(9)] == ["d"] * 9
    queues.answered("b", 100)  # it has gone; nothing comes of it
    assert queues.choose(["b", "d"], 1) == "b"


def test_after_a_death_another_replica_is_asked_if_there_is_one() -> None:
    queues = TokenQueues()
    assert {queues.choose(["a", "b"], 0, avoid="a") for _ in range(20)} == {"b"}
    assert queues.choose(["a"], 10, avoid="a") == "a"
    assert queues.choose([], 10) == ""


def test_a_place_in_a_queue_is_given_back_once() -> None:
    queues = TokenQueues()
    one, other = (_Ticket(key, request(questions=4), queues) for key in "ab")
    one.join(["a"])
    other.join(["a"])
    one.deliver([RowAnswer(0, (0.5, 0.5), 0.9, 7)])
    one.deliver([RowAnswer(0, (0.5, 0.5), 0.9, 7)])  # a second time, after a retry
    assert queues._tokens["a"] == pytest.approx(1.75 * other.owed)
    one.leave()
    one.fail(ReplicaUnavailableError("both replicas died"))
    assert queues._tokens["a"] == pytest.approx(other.owed)
    other.fail(ReplicaUnavailableError("gone"))
    assert queues._tokens["a"] == pytest.approx(0)


def test_the_size_of_a_request_grows_with_text_questions_and_images() -> None:
    def size(record: RequestRecord) -> float:
        return tokens_of(pack_request(record), len(record.questions))

    small = size(request("x", questions=1))
    assert size(request("x" * 4000, questions=1)) == pytest.approx(small + 1000, abs=1)
    assert size(request("x", questions=9)) > 3 * small
    assert size(request("x", questions=1, images=(b"\xff" * 9_000_000,))) == small + 500


async def opened(tmp_path: Path, replicas: int) -> EmbeddedModel:
    config = ModelConfig(model="fake?token_latency=1e-4&poison=POISON", backend="fake", replicas=replicas)
    model = EmbeddedModel(config, tmp_path)
    await model.start()
    return model


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
async def test_short_requests_pass_by_a_long_one(tmp_path: Path) -> None:
    """The long one takes 0.7 s; the short ones, many of them, go to the other replica, and the books balance."""
    model = await opened(tmp_path, 2)
    calls = model._calls
    assert isinstance(calls, ModelCalls)
    for _ in range(300):  # an embedded client is open when its first replica is up
        if len(running_replicas(calls.handle) or []) == 2:
            break
        await asyncio.sleep(0.1)
    assert len(running_replicas(calls.handle) or []) == 2
    sent: Counter[str] = Counter()
    start = calls._start

    def counted(batch: list[object], size: int) -> asyncio.Task[None]:
        sent[batch[0].replica] += len(batch)  # type: ignore[attr-defined]
        return start(batch, size)  # type: ignore[arg-type]

    calls._start = counted  # type: ignore[method-assign,assignment]
    long = asyncio.ensure_future(answers(model, request("x" * 7000, questions=1)))
    await asyncio.sleep(0.05)
    (busy,) = sent
    for _ in range(5):
        await answers(model, request("short", questions=1))
    assert not long.done()
    assert sent == {busy: 1, next(name for name in sent if name != busy): 5}
    await long
    await outcomes(model, request("POISON"))
    rows = model.decide(request("left early", questions=40))
    async for _ in rows:
        break
    await rows.aclose()
    assert all(tokens == pytest.approx(0, abs=1e-6) for tokens in calls._queues._tokens.values())
    await model.close()
