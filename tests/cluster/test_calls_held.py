"""Calls that Serve holds because no replica is up, with Serve's handle played: no cluster is needed."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest

from sakuradite.cluster import calls as calls_module
from sakuradite.cluster.calls import ModelCalls
from sakuradite.errors import RequestTimeoutError
from tests.cluster.asking import answers, request


class Held:
    """A call that waits for a replica."""

    def __init__(self) -> None:
        self.cancelled = False
        self._up = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.cancelled = True

    def __aiter__(self) -> Held:
        return self

    async def __anext__(self) -> bytes:
        await self._up
        raise StopAsyncIteration

    def __await__(self) -> Any:
        return self._up.__await__()


class Handle:
    """Serve's handle of a model that is scaled to zero."""

    app_name = "cold"

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.methods: list[str] = []

    def options(self, **options: Any) -> Any:
        this, method = self, options.get("method_name", "")

        class Bound(Handle):
            def __init__(self) -> None: ...

            def options(self, **more: Any) -> Any:
                return self

            def remote(self, *_: Any, **__: Any) -> Held:
                this.methods.append(method)
                this.held.append(Held())
                return this.held[-1]

        return Bound()

    def broadcast(self, *_: Any) -> Any:
        raise AssertionError("there is nobody to tell")

    async def shutdown_async(self) -> None: ...


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own modules
        import ray.serve  # noqa: F401
    made = Handle()
    monkeypatch.setattr(calls_module, "handle_of", lambda *_: made)
    monkeypatch.setattr(calls_module, "running_replicas", lambda _: [])
    monkeypatch.setattr(calls_module, "GRACE_SECONDS", 0.0)
    return made


async def test_calls_that_nobody_waits_for_are_taken_back_and_a_replica_is_started_all_the_same(
    handle: Handle,
) -> None:
    calls = ModelCalls("cold", 60)
    gone = [asyncio.ensure_future(answers(calls, request())) for _ in range(5)]
    stays = asyncio.ensure_future(answers(calls, request()))
    await asyncio.sleep(0.02)  # the first two go alone, the others in one call
    assert handle.methods == ["decide_many"] * 3
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    with pytest.raises(RequestTimeoutError):
        await answers(calls, request(timeout=0.05))
    await asyncio.sleep(0.02)
    by_method = list(zip(handle.methods, (held.cancelled for held in handle.held), strict=True))
    decisions = [cancelled for method, cancelled in by_method if method == "decide_many"]
    assert decisions == [True, True, False, True], "the third has one that is waited for"
    assert by_method.count(("describe", False)) == 1
    assert not stays.done()
    await calls.close()
    await asyncio.gather(stays, return_exceptions=True)
