"""Who is to blame for the death of a replica, with Serve's handle played: replicas die when a test says so."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from sakuradite.cluster import calls as calls_module
from sakuradite.cluster.calls import MAX_DEATHS, ModelCalls
from sakuradite.cluster.deaths import Place
from sakuradite.errors import InferenceFailedError, ReplicaUnavailableError
from sakuradite.records import Outcome, Packet, RowAnswer, pack_outcomes, unpack_request
from tests.cluster.asking import answers, request

ANSWER = {0: (0.5, 0.5)}


class Stream:
    """The answers to one call."""

    def __init__(self, data: AsyncGenerator[bytes]) -> None:
        self.cancelled = False
        self._data = data

    def cancel(self) -> None:
        self.cancelled = True

    def __aiter__(self) -> AsyncGenerator[bytes]:
        return self._data


class Replicas:
    """Serve's handle of a model whose replicas die of every text that has POISON in it, and of others' requests."""

    app_name = "played"

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        """Methods and the texts that went there."""
        self.streams: list[Stream] = []
        self.others = 0
        """So many calls find a replica that dies of something else, before a turn has come."""
        self.turn = asyncio.Event()
        self.turn.set()

    def options(self, **options: Any) -> Any:
        method, this = options.get("method_name", ""), self

        class Bound:
            def options(self, **_: Any) -> Any:
                return self

            def remote(self, requests: list[tuple[str, Packet]], *_: Any, **__: Any) -> Stream:
                this.streams.append(Stream(this._answers(method, requests)))
                return this.streams[-1]

            def broadcast(self, *_: Any) -> Any:
                return self

            def _ensure_scheduled(self) -> None: ...

        return Bound()

    async def _answers(self, method: str, requests: list[tuple[str, Packet]]) -> AsyncGenerator[bytes]:
        from ray.exceptions import ActorDiedError

        texts = [str(unpack_request(packet).state[0]) for _, packet in requests]
        self.calls.append((method, texts))
        await asyncio.sleep(0)
        if self.others:
            self.others -= 1
            raise ActorDiedError
        if method == "decide_alone":
            await self.turn.wait()
            yield Place("actor", "node").pack()
        if any("POISON" in text for text in texts):
            raise ActorDiedError
        outcomes: list[Outcome] = [RowAnswer(0, (0.5, 0.5), 0.9, 1)]
        yield pack_outcomes([(key, outcomes) for key, _ in requests])

    async def shutdown_async(self) -> None: ...


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own modules
        import ray.serve  # noqa: F401
    made = Replicas()

    async def stands(place: Place) -> bool:
        assert place == Place("actor", "node")
        return False

    monkeypatch.setattr(calls_module, "handle_of", lambda *_: made)
    monkeypatch.setattr(calls_module, "running_replicas", lambda _: ["one", "two"])
    monkeypatch.setattr(calls_module, "SUSPECT_SECONDS", 0.0)
    monkeypatch.setattr(calls_module, "node_lost", stands)
    return made


def ask(calls: ModelCalls, text: str) -> asyncio.Task[dict[int, tuple[float, ...]]]:
    return asyncio.ensure_future(answers(calls, request(text, questions=1)))


async def test_a_request_that_kills_is_found_when_it_is_alone_and_its_company_is_answered(replicas: Replicas) -> None:
    calls = ModelCalls("played", 60)
    innocent = [ask(calls, f"innocent {i}") for i in range(5)]
    with pytest.raises(InferenceFailedError, match="3 replicas in turn died"):
        await ask(calls, "POISON")
    assert await asyncio.gather(*innocent) == [ANSWER] * 5
    assert [texts for method, texts in replicas.calls if method == "decide_alone"].count(["POISON"]) == 1
    asked = len(replicas.calls)
    with pytest.raises(InferenceFailedError, match="the same request"):
        await ask(calls, "POISON")
    assert len(replicas.calls) == asked
    assert await ask(calls, "innocent 1") == ANSWER
    await calls.close()


@pytest.mark.parametrize("others", [1, 2, 3, 5, MAX_DEATHS - 1])
async def test_replicas_that_die_of_others_are_not_held_against_a_request(replicas: Replicas, others: int) -> None:
    replicas.others = others
    calls = ModelCalls("played", 60)
    assert await ask(calls, "innocent") == ANSWER
    assert [method for method, _ in replicas.calls] == (["decide_many"] * 2 + ["decide_alone"] * MAX_DEATHS)[
        : others + 1
    ]
    await calls.close()


async def test_a_node_that_is_lost_is_not_held_against_the_request_that_was_alone_on_it(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [True, True, False]

    async def node_lost(_: Place) -> bool:
        return lost.pop(0)

    monkeypatch.setattr(calls_module, "node_lost", node_lost)
    calls = ModelCalls("played", 60)
    with pytest.raises(InferenceFailedError, match="5 replicas in turn died"):
        await ask(calls, "POISON")
    assert lost == []
    await calls.close()


async def test_where_ray_cannot_say_what_died_nobody_is_blamed(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RaySystemError

    async def node_lost(_: Place) -> bool:
        raise RaySystemError("no GCS")

    monkeypatch.setattr(calls_module, "node_lost", node_lost)
    calls = ModelCalls("played", 60)
    with pytest.raises(ReplicaUnavailableError):
        await ask(calls, "POISON")
    assert len(replicas.calls) == MAX_DEATHS
    await calls.close()


async def test_a_request_is_not_sent_for_ever_and_not_refused_for_what_others_did(replicas: Replicas) -> None:
    replicas.others = MAX_DEATHS
    calls = ModelCalls("played", 60)
    with pytest.raises(ReplicaUnavailableError, match=f"{MAX_DEATHS} replicas in turn") as lost:
        await ask(calls, "innocent")
    assert lost.value.retry_after
    assert len(replicas.calls) == MAX_DEATHS
    assert await ask(calls, "innocent") == ANSWER
    await calls.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_suspect_that_nobody_waits_for_gives_up_its_place_and_the_next_one_is_tried(replicas: Replicas) -> None:
    replicas.others = 4  # each goes in a call of its own
    calls = ModelCalls("played", 60)
    replicas.turn.clear()
    gone, stays = ask(calls, "gone"), ask(calls, "stays")
    await until(lambda: ("decide_alone", ["gone"]) in replicas.calls)
    gone.cancel()
    await asyncio.wait([gone])
    await until(lambda: ("decide_alone", ["stays"]) in replicas.calls)
    alone = [s for s, (method, _) in zip(replicas.streams, replicas.calls, strict=True) if method == "decide_alone"]
    assert [stream.cancelled for stream in alone] == [True, False]
    replicas.turn.set()
    assert await stays == ANSWER
    await calls.close()


async def test_a_request_that_killed_is_blamed_though_nobody_waits_and_the_next_one_is_tried_at_once(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray takes its time to say whether the node was lost."""
    word, asked = asyncio.Event(), asyncio.Event()

    async def node_lost(_: Place) -> bool:
        asked.set()
        await word.wait()
        return False

    monkeypatch.setattr(calls_module, "node_lost", node_lost)
    replicas.others = 4  # each goes in a call of its own
    calls = ModelCalls("played", 60)
    gone, stays = ask(calls, "POISON"), ask(calls, "stays")
    await asked.wait()
    assert await stays == ANSWER
    gone.cancel()
    await asyncio.wait([gone])
    word.set()
    await asyncio.sleep(0.01)
    sent = len(replicas.calls)
    with pytest.raises(InferenceFailedError, match="the same request"):
        await ask(calls, "POISON")
    assert len(replicas.calls) == sent
    await calls.close()


async def test_closing_fails_a_request_of_which_ray_has_not_told_yet(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def node_lost(_: Place) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(calls_module, "node_lost", node_lost)
    calls = ModelCalls("played", 60)
    waiting = ask(calls, "POISON")
    await asked.wait()
    await calls.close()
    with pytest.raises(ReplicaUnavailableError, match="being unloaded"):
        await waiting
