"""The caller's side against a real replica: joined calls, large ones, cancellation, deadlines, death."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sakuradite.cluster import calls as calls_module
from sakuradite.cluster.calls import ModelCalls
from sakuradite.cluster.deaths import Place, node_lost
from sakuradite.cluster.embedded import EmbeddedModel
from sakuradite.cluster.handles import running_replicas
from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.errors import (
    APIError,
    CapacityExceededError,
    InferenceFailedError,
    ReplicaUnavailableError,
    RequestTimeoutError,
    ValidationError,
)
from sakuradite.records import RowAnswer, RowFailure, pack_request, unpack_outcomes
from tests.cluster.asking import answers, outcomes, request
from tests.cluster.processes import descendants, name

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


async def opened(tmp_path: Path, model: str, **more: object) -> EmbeddedModel:
    config = ModelConfig.model_validate({"model": model, "backend": "fake", **more})
    embedded = EmbeddedModel(config, tmp_path)
    await embedded.start()
    return embedded


def inner(model: EmbeddedModel) -> ModelCalls:
    assert model._calls is not None
    return model._calls


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[EmbeddedModel]:
    embedded = await opened(tmp_path, "fake?poison=POISON&crash=CRASH", max_pending_requests=200)
    yield embedded
    await embedded.close()


async def test_many_at_once_share_calls_and_get_their_own_answers(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    call = ModelCalls._call

    async def counted(self: ModelCalls, batch: list[object], size: int) -> None:
        sizes.append(len(batch))
        await call(self, batch, size)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelCalls, "_call", counted)
    engine = Engine(ModelConfig(model="fake", backend="fake"), None)
    await engine.start()
    texts = [f"text {i}" for i in range(150)]
    found = await asyncio.gather(*(answers(model, request(text, id_="the same id")) for text in texts))
    assert found == [await answers(engine, request(text)) for text in texts]
    assert sum(sizes) == 150
    assert len(sizes) < 30
    assert max(sizes) <= calls_module.MAX_CALL_REQUESTS
    await engine.stop(0)


async def test_a_request_above_the_grpc_limit(tmp_path: Path) -> None:
    model = await opened(tmp_path, "fake", max_input_tokens=1 << 20)
    large = request("x" * 500_000, questions=1, images=())
    assert len(await answers(model, large)) == 1
    pictures = request(images=(b"\xff" * (calls_module.MAX_CALL_BYTES + 1),))
    with pytest.raises(APIError) as refused:  # it arrived: the model itself refuses pictures
        await answers(model, pictures)
    assert refused.value.code in ("unsupported_model", "validation_error")
    assert refused.value.status == 422
    await model.close()


async def test_one_bad_row_or_request_fails_alone(model: EmbeddedModel) -> None:
    """Case 56, and errors keep class, code and fields over the process boundary (case 55)."""
    many = request(questions=401)
    good, bad, refused = await asyncio.gather(
        outcomes(model, request("good")), outcomes(model, request("POISON")), outcomes(model, many),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(good, dict)
    assert all(isinstance(o, RowAnswer) for o in good.values())
    assert isinstance(bad, dict)
    assert [o.error.code for o in bad.values() if isinstance(o, RowFailure)] == ["inference_failed"] * 3
    assert isinstance(refused, ValidationError)
    assert (refused.status, refused.param) == (422, "questions")


async def test_closing_early_cancels_what_has_not_started(tmp_path: Path) -> None:
    model = await opened(tmp_path, "fake?latency=0.3", max_batch_size=1)
    company = asyncio.ensure_future(answers(model, request("company", questions=2)))
    rows = model.decide(request(questions=60))
    async for _ in rows:
        break
    await rows.aclose()
    begun = time.monotonic()
    assert len(await answers(model, request("after", questions=1))) == 1
    assert time.monotonic() - begun < 9  # the 59 rows left would have taken 18 s
    assert len(await company) == 2
    await model.close()


async def test_a_cancelled_task_cancels_its_rows(tmp_path: Path) -> None:
    model = await opened(tmp_path, "fake?latency=0.3", max_batch_size=1)
    task = asyncio.ensure_future(answers(model, request(questions=60)))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    begun = time.monotonic()
    assert len(await answers(model, request("after", questions=1))) == 1
    assert time.monotonic() - begun < 9
    await model.close()


async def test_the_deadline_holds(tmp_path: Path) -> None:
    model = await opened(tmp_path, "fake?latency=0.5", max_batch_size=1)
    with pytest.raises(RequestTimeoutError):
        await answers(model, request(questions=60, timeout=1.0))
    assert len(await answers(model, request(questions=1))) == 1
    await model.close()


async def test_a_full_queue_is_said_at_once(tmp_path: Path) -> None:
    model = await opened(tmp_path, "fake?latency=0.3", max_batch_size=1, max_pending_requests=2)
    found = await asyncio.gather(*(answers(model, request(questions=1)) for _ in range(10)), return_exceptions=True)
    refused = [f for f in found if isinstance(f, CapacityExceededError)]
    assert len(refused) >= 7
    assert all(error.retry_after for error in refused)
    assert sum(isinstance(f, dict) for f in found) == 10 - len(refused)
    await model.close()


async def test_a_request_that_kills_replicas_is_found_and_takes_nobody_with_it(model: EmbeddedModel) -> None:
    """Who was in its company is answered by the next replica; it is not tried for ever, nor when it comes again."""
    before = [pid for pid in descendants(os.getpid()) if f"{model._name}:Model" in name(pid)]
    expected = await answers(model, request("innocent"))
    assert len(running_replicas(inner(model)._handle) or []) == 1
    killer = asyncio.ensure_future(answers(model, request("CRASH")))
    innocent = [asyncio.ensure_future(answers(model, request("innocent"))) for _ in range(3)]
    with pytest.raises(InferenceFailedError, match="3 replicas in turn died"):
        await killer
    assert await asyncio.gather(*innocent) == [expected] * 3
    after = [pid for pid in descendants(os.getpid()) if f"{model._name}:Model" in name(pid)]
    assert not set(before) & set(after)
    with pytest.raises(InferenceFailedError, match="the same request"):
        await answers(model, request("CRASH", id_="another", timeout=60))
    assert [pid for pid in descendants(os.getpid()) if f"{model._name}:Model" in name(pid)] == after


async def test_a_caller_is_told_where_its_request_is_computed_alone_and_how_that_place_ended(tmp_path: Path) -> None:
    model = await opened(tmp_path, "fake")
    alone = inner(model).handle.options(stream=True, method_name="decide_alone", _by_reference=False)
    data = [piece async for piece in alone.remote([("key", pack_request(request()))], None, replica="")]
    place = Place.unpack(data[0])
    assert [key for key, _ in unpack_outcomes(data[1])] == ["key"]
    (pid,) = (pid for pid in descendants(os.getpid()) if f"{model._name}:Model" in name(pid))
    os.kill(pid, signal.SIGKILL)
    assert not await node_lost(place)
    assert await node_lost(place._replace(node="f" * len(place.node)))
    await model.close()


async def test_two_replicas_share_the_work(tmp_path: Path) -> None:
    model = await opened(tmp_path, "fake?latency=0.05", replicas=2)
    pids = set()
    for _ in range(100):
        pids.add((await inner(model).describe())["pid"])
        if len(pids) == 2:
            break
        await asyncio.sleep(0.1)
    assert len(pids) == 2
    found = await asyncio.gather(*(answers(model, request(f"text {i}")) for i in range(40)))
    assert all(len(f) == 3 for f in found)
    await model.close()


async def test_with_cold_start_reject_no_replica_is_an_answer(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = inner(model)
    monkeypatch.setattr(calls, "_cold_start", "reject")
    assert len(await answers(model, request())) == 3
    monkeypatch.setattr(calls_module, "running_replicas", lambda handle: [])
    with pytest.raises(ReplicaUnavailableError):
        await answers(model, request())
