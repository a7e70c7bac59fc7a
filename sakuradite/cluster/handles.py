"""Serve's handles of a model's replicas, as this project makes and reads them."""

from __future__ import annotations

from typing import Any

MODEL_DEPLOYMENT = "Model"


def handle_of(deployment: str, application: str) -> Any:
    """A Serve handle of its own that works in this event loop: Serve's own loop would be a thread and two hops away.

    Made without `serve.get_deployment_handle`, which gives out one handle again and again, a closed one too.
    """
    from ray.serve.handle import DeploymentHandle

    handle: Any = DeploymentHandle(deployment, application)
    handle._init(_run_router_in_separate_loop=False)
    return handle


def forget_classes(application: str) -> None:
    """Drop this process's copies of the class of a model's replicas: each deployment has one of its own, 35 KB, which
    Ray would keep for ever. Whoever still calls the application needs it no more, or gets it again.

    By private attributes of Ray's function manager; a test watches.
    """
    from ray._private.worker import global_worker

    manager: Any = global_worker.function_actor_manager
    name = f"ServeReplica:{application}:{MODEL_DEPLOYMENT}"
    for key, loaded in list(manager._loaded_actor_classes.items()):
        if loaded.__name__ == name:
            del manager._loaded_actor_classes[key]
            manager._function_execution_info.pop(key, None)
            manager._num_task_executions.pop(key, None)


def running_replicas(handle: Any) -> list[str] | None:
    """The replicas that the handle may send to right now, None as long as it has not heard of any or none.

    By private attributes of Serve's router; a test watches.
    """
    router = getattr(handle._router, "_asyncio_router", handle._router)
    chooser = router.request_router
    return None if chooser is None else [replica.unique_id for replica in chooser.curr_replicas]
