"""Put a model's application on Serve, wait until it answered its probe, take it away again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sakuradite.cluster.calls import ModelCalls
from sakuradite.errors import ModelLoadFailedError, error_from_record
from sakuradite.operations import ModelCapabilities

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ApplicationStatusOverview

STATUS_SECONDS = 0.5
"""Between looks at Serve's own status. A replica that is ready answers before that, by itself."""


async def in_thread[T](call: Callable[[], T]) -> T:
    """A blocking call on a daemon thread of its own: unlike an executor's it never delays the end of the program."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(done: Future[T]) -> None:
        if future.cancelled():
            return
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())

    def work() -> None:
        done: Future[T] = Future()
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, done)

    threading.Thread(target=work, name="sakuradite-blocking", daemon=True).start()
    return await future


async def to_the_end[T](work: Coroutine[Any, Any, T]) -> T:
    """Await something that must not be left half done: a cancellation is raised when it has ended."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
        except BaseException:
            break
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


_configuring = threading.RLock()
"""Serve's configurations register a module for pickling while they are made, and take that back: of two threads that
make some at once, be it only by a look at the status, one may fail."""


def submit(name: str, build: Callable[[], Application]) -> None:
    """Build the application and hand it to Serve without waiting for it. Blocks for some 20 ms."""
    from ray import serve
    from ray.serve.api import RunTarget

    with _configuring:
        serve.run_many(
            [RunTarget(target=build(), name=name, route_prefix=None)],
            wait_for_ingress_deployment_creation=True,
            wait_for_applications_running=False,
        )


def submit_once(name: str, build: Callable[[], Application]) -> None:
    """`submit`, unless the application is there: submitting it again would replace its replicas."""
    if name not in applications():
        submit(name, build)


def status() -> dict[str, ApplicationStatusOverview]:
    """Serve's applications by name, and how they are. Empty where no Serve runs. Blocks."""
    from ray import serve

    with _configuring:
        found: dict[str, ApplicationStatusOverview] = serve.status().applications
    return found


async def wait_until_ready(name: str, calls: ModelCalls, replicas: int = 1) -> ModelCapabilities:
    """The model's capabilities once so many replicas have answered their probe, `together` where there are several.

    Raises the model's own failure, or ModelLoadFailedError when the replica itself could not be started.
    """
    from ray.exceptions import RayError

    descriptions = [await first_answer(name, calls.describe())]
    while True:
        for description in descriptions:
            if description["failure"] is not None:
                raise error_from_record(description["failure"])
        if len(descriptions) >= replicas:
            return together([description["capabilities"] for description in descriptions])
        await asyncio.sleep(STATUS_SECONDS)
        if (problem := await in_thread(lambda: failure(name))) is not None:
            raise ModelLoadFailedError(problem)
        with suppress(RayError):  # one may have died; Serve starts another, or says that it gives up
            descriptions = await calls.describe_all()


def together(replicas: Sequence[ModelCapabilities]) -> ModelCapabilities:
    """What the first replica says of itself, with the warnings of all, and one where their answers will differ."""
    warnings = [warning for replica in replicas for warning in replica.warnings]
    differing = [
        f"the replicas differ in {name}: {', '.join(sorted(found))}"
        for name in ("dtype", "device", "prefix_reuse")
        if len(found := {getattr(replica, name) for replica in replicas}) > 1
    ]
    return replicas[0].model_copy(update={"warnings": tuple(dict.fromkeys([*warnings, *differing]))})


async def first_answer[T](name: str, question: Coroutine[Any, Any, T]) -> T:
    """The answer of a replica that is being started, which comes by itself when it is up.

    Raises ModelLoadFailedError with Serve's words when there will be none.
    """
    asking = asyncio.ensure_future(question)
    try:
        while not (await asyncio.wait([asking], timeout=STATUS_SECONDS))[0]:
            if (problem := await in_thread(lambda: failure(name))) is not None:
                raise ModelLoadFailedError(problem)
        return asking.result()
    finally:
        asking.cancel()


def failure(name: str) -> str | None:
    """Serve's own word on why an application failed or is gone; None while there is hope."""
    application = status().get(name)
    if application is None:
        return "the application was deleted while it was loading"
    if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        messages = [application.message, *(d.message for d in application.deployments.values())]
        return " ".join(filter(None, messages)) or f"Serve reports {application.status}"
    return None


def applications() -> dict[str, str]:
    """Serve's applications and their status. Empty where no Serve runs."""
    return {name: str(app.status) for name, app in status().items()}


def delete(name: str, drain: bool = True) -> None:
    """Drain and delete; returns when the replicas are gone. Blocks.

    Without `drain` the replicas are killed, for a load that came to nothing: Serve asks one that waits for its
    resources to finish its requests, and waits for the answer all of the drain time.
    """
    import time

    from ray import serve

    serve.delete(name, _blocking=False)
    while name in status():
        if not drain:
            _kill_replicas(name)
        time.sleep(0.1)


def _kill_replicas(name: str) -> None:
    """Kill the replicas of an application, not yet started ones too (by Serve's names for them; a test watches)."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == "serve" and actor["name"].startswith(f"SERVE_REPLICA::{name}#"):
            with suppress(ValueError):  # gone meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace="serve"))
