"""What a load and an unload leave behind in the processes that live on: nothing that grows with their number."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sakuradite.cluster.calls import ModelCalls
from sakuradite.cluster.journal import Journal
from sakuradite.cluster.lifecycle import Lifecycle
from sakuradite.config import ModelConfig
from tests.cluster.asking import answers, request

MODEL = "fake-again"


async def nobody() -> None:
    """No router has to hear of changes."""


async def load_ask_unload(life: Lifecycle) -> str:
    """The application that it was."""
    operation = life.load(ModelConfig(model=MODEL, backend="fake", num_cpus=0))
    await asyncio.wait([life._tasks[operation.id]])
    ended = life.operation(operation.id)
    assert ended.status == "succeeded", ended.error
    application = life.models[MODEL].application
    calls = ModelCalls(application, 60)  # as a router
    assert len(await answers(calls, request())) == 3
    await calls.close()
    await life.unload(MODEL)
    return application


def held_here() -> Counter[str]:
    """Objects of this process, which is catalog and router in one."""
    from ray._private.worker import global_worker
    from ray.serve._private.long_poll import LongPollClient
    from ray.serve.handle import DeploymentHandle

    gc.collect()
    held: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)  # not what it says that it is: some warn when they are asked
        if issubclass(kind, DeploymentHandle):
            held["handles"] += 1
        elif issubclass(kind, LongPollClient):
            held["keys listened to"] += len(thing.key_listeners)
    manager: Any = global_worker.function_actor_manager
    held["executors of replicas"] = len(manager._function_execution_info)
    held["classes of replicas"] = len(manager._loaded_actor_classes)
    return held


def held_by_controller() -> Counter[str]:
    """What Serve's controller tells its listeners about."""
    import ray

    def look(controller: Any) -> dict[str, int]:
        host = controller.long_poll_host
        return {"keys": len(host.object_snapshots), "listened to": len(host.notifier_events)}

    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    return Counter(ray.get(controller.__ray_call__.remote(look)))


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
async def test_nothing_is_kept_of_loads_that_are_over(tmp_path: Path) -> None:
    life = Lifecycle(Journal(tmp_path), tmp_path, "s", 1.0, lambda: None, nobody)
    applications = {await load_ask_unload(life)}
    before = held_by_controller(), held_here()
    for _ in range(2):
        applications.add(await load_ask_unload(life))
    after = held_by_controller(), held_here()
    assert (after[0] - before[0], after[1] - before[1]) == (Counter(), Counter())
    assert len(applications) == 1
    await life.close()
