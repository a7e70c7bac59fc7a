"""The Serve deployment of one model: an asyncio front around `Engine`, whose worker thread owns the weights."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from pathlib import Path
from typing import Any

from sakuradite.cluster.deaths import here
from sakuradite.cluster.observers import ReplicaObserver
from sakuradite.cluster.reporting import Reporting
from sakuradite.cluster.scaling import PENDING
from sakuradite.cluster.seeing import Seeing
from sakuradite.cluster.stores import node_home, node_name
from sakuradite.cluster.turns import Turns
from sakuradite.config import ModelConfig, log_settings
from sakuradite.errors import (
    APIError,
    ConfigurationError,
    ErrorRecord,
    InternalError,
    MissingExtraError,
    ReplicaUnavailableError,
    error_from_record,
    place_of,
)
from sakuradite.operations import ModelCapabilities
from sakuradite.records import Outcome, Packet, RowFailure, pack_outcomes, unpack_request

log = logging.getLogger(__name__)

STUCK_EXIT = 75
FAILED_SECONDS = 30.0
"""A replica that could not load reports why for this long; then Serve may try another in its place."""
OTHER_MODEL_SECONDS = 5.0
"""By then every router knows which model the application serves now."""
BUSY_SECONDS = 0.02
"""Between looks whether a batch has ended of which nobody waits for the end."""
TOLD_SECONDS = 0.1
"""From telling a caller that it is its request's turn to computing it: the word must outrun the end of the process."""

type Turn = Callable[[], AbstractAsyncContextManager[None]]


class Model:
    """One replica. Its constructor returns when the model answered its load-time probe, or could not.

    A failure to load is kept as data: an exception here would be tried three times and lose its code.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: dict[str, Any],
        home: str | None,
        owner: str | None = None,
        logs: dict[str, Any] | None = None,
        own_stores: bool = False,
        operation: str | None = None,
    ) -> None:
        self._config = ModelConfig.model_validate(config)
        self._failure: ErrorRecord | None = None
        self._failed_at = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns = Turns()
        self._seconds: dict[str, float] = {}
        self._created, self._owner = int(time.time()), owner
        set_threads(self._config.num_cpus)
        self._seeing = Seeing("model", log_settings(**logs or {}))
        self._seeing.meters.refresh(self._look)
        try:
            await self._load(node_home(home, own_stores), operation)
        except APIError as error:
            self._fail(error.record())
        except MissingExtraError as error:
            self._fail(ConfigurationError(str(error)).record())
        except Exception as error:
            log.exception("loading failed")
            self._fail(InternalError(f"loading failed: {type(error).__name__}: {error}").record())
        self._owner_watch = asyncio.ensure_future(_end_with_owner(owner)) if owner else None

    async def _load(self, home: Path, operation: str | None) -> None:
        clock = time.perf_counter()
        from sakuradite.engine.engine import Engine

        report = None if operation is None or self._config.backend == "fake" else Reporting(operation)
        try:
            checkpoint, created = await asyncio.to_thread(_checkpoint, self._config, home, report)
        except APIError as error:
            raise _on_this_node(error) from None
        finally:
            if report is not None:
                await report.close()
        self._created = created or self._created
        self._seconds["resolve"] = time.perf_counter() - clock
        clock = time.perf_counter()
        seeing = self._seeing
        observer = ReplicaObserver(seeing.meters, seeing.tracing, seeing.lines, self._config.model)
        self._engine = Engine(self._config, checkpoint, observer=observer)
        await self._engine.start()
        self._seconds["load"] = time.perf_counter() - clock

    def _fail(self, failure: ErrorRecord) -> None:
        self._failure, self._failed_at = failure, time.monotonic()

    async def describe(self) -> dict[str, Any]:
        """`capabilities` (None where loading failed), `failure` (an ErrorRecord or None), `config`, `created` (of the
        checkpoint), `owner` (the job of an embedded client, or None), `seconds` by phase, `pid`.
        """
        capabilities: ModelCapabilities | None = None if self._failure else self._engine.capabilities
        return {
            "capabilities": capabilities,
            "failure": self._failure,
            "config": self._config,
            "created": self._created,
            "owner": self._owner,
            "seconds": self._seconds,
            "pid": os.getpid(),
        }

    async def decide_many(
        self, batch: list[tuple[str, Packet]], model: str | None = None, replica: str = ""
    ) -> AsyncGenerator[bytes]:
        """`pack_outcomes` groups for several requests under the caller's keys, as rows finish.

        A request's failure is a RowFailure with row -1. Closing the stream cancels what has not started. `model` is
        the one that the requests are for: a Serve config may have given its application another one meanwhile.
        `replica` is the way here, see `Directed`.
        """
        async with aclosing(self._answers(batch, model, self._turns.together)) as groups:
            async for group in groups:
                yield group

    async def decide_alone(
        self, batch: list[tuple[str, Packet]], model: str | None = None, replica: str = ""
    ) -> AsyncGenerator[bytes]:
        """`decide_many` while nothing else is computed here, for one request: if the process then ends, that is why.

        Where it is computed comes first, as a packed `Place`, as soon as it is its turn.
        """
        async with self._turns.alone(), aclosing(self._answers(batch, model, nullcontext)) as groups:
            while self._failure is None and self._engine.computing:  # noqa: ASYNC110  # for a caller that has gone
                await asyncio.sleep(BUSY_SECONDS)
            yield here().pack()
            await asyncio.sleep(TOLD_SECONDS)
            async for group in groups:
                yield group

    async def _answers(self, batch: list[tuple[str, Packet]], model: str | None, turn: Turn) -> AsyncGenerator[bytes]:
        if model is not None and model != self._config.model:
            error = ReplicaUnavailableError(f"{model} is no longer served", retry_after=OTHER_MODEL_SECONDS).record()
            yield pack_outcomes([(key, [RowFailure(-1, error)]) for key, _ in batch])
            return
        ready: list[tuple[str, list[Outcome]]] = []
        wake = asyncio.Event()
        tasks = []
        for key, packet in batch:
            task = asyncio.ensure_future(self._decide(key, packet, ready, wake, turn))
            self._tasks[key] = task
            tasks.append(task)
        running = len(tasks)

        def ended(task: asyncio.Task[None]) -> None:
            nonlocal running
            running -= 1
            wake.set()

        for task in tasks:
            task.add_done_callback(ended)
        try:
            while running or ready:
                if not ready:
                    wake.clear()
                    await wake.wait()
                if ready:
                    groups = ready[:]
                    ready.clear()
                    yield pack_outcomes(groups)
        finally:
            for task in tasks:
                task.cancel()
            for key, _ in batch:
                self._tasks.pop(key, None)

    async def _decide(
        self, key: str, packet: Packet, ready: list[tuple[str, list[Outcome]]], wake: asyncio.Event, turn: Turn
    ) -> None:
        try:
            if self._failure is not None:  # others have loaded, or nobody would ask
                raise ReplicaUnavailableError(
                    f"this replica could not load: {self._failure.message}", retry_after=FAILED_SECONDS
                )
            async with turn(), aclosing(self._engine.decide(unpack_request(packet))) as rows:
                async for outcomes in rows:
                    ready.append((key, outcomes))
                    wake.set()
        except APIError as error:
            ready.append((key, [RowFailure(-1, error.record())]))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.error("a request failed: %s", place_of(error))
            ready.append((key, [RowFailure(-1, InternalError("the engine failed on this request").record())]))

    async def figures(self) -> Any:
        """What this replica counted, for `/metrics`."""
        return self._seeing.figures()

    def _look(self) -> None:
        """Set the gauges."""
        meters, model = self._seeing.meters, self._config.model
        engine: Any = getattr(self, "_engine", None)
        able = engine.capabilities if engine is not None and self._failure is None else None
        meters["sakuradite_replica_ready"].labels(model).set(able is not None and engine.alive)
        for phase, seconds in self._seconds.items():
            meters["sakuradite_load_seconds"].labels(model, phase).set(seconds)
        for kind, size in resident_bytes(able).items():
            meters["sakuradite_resident_bytes"].labels(model, kind).set(size)
        if able is not None:
            meters["sakuradite_queue_requests"].labels(model).set(engine.pending_requests)
            meters["sakuradite_queue_bytes"].labels(model).set(engine.pending_bytes)
            meters["sakuradite_queue_rows"].labels(model).set(engine.pending_questions)
            meters["sakuradite_queue_tokens"].labels(model).set(engine.pending_tokens)

    async def cancel(self, keys: list[str]) -> None:
        """Give up requests by the caller's keys: rows that have not started are dropped."""
        for key in keys:
            if (task := self._tasks.get(key)) is not None:
                task.cancel()

    async def check_health(self) -> None:
        """Raises when this replica should be replaced because it could not load.

        Where the worker thread is dead or stuck the process ends: Serve replaces one that is gone at once, one that
        calls itself unhealthy only after three looks, and what waits here is sent to another replica.
        """
        if self._failure is not None:
            if time.monotonic() - self._failed_at > FAILED_SECONDS:
                raise RuntimeError(f"{self._failure.code}: {self._failure.message}")
        elif not self._engine.alive:
            log.critical("%s: the worker thread has ended or is stuck in a batch; the process ends", self._config.model)
            os._exit(STUCK_EXIT)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For Serve's autoscaling: requests that wait or run."""
        return {PENDING: 0.0 if self._failure else float(self._engine.pending_requests)}

    async def __del__(self) -> None:
        if (engine := getattr(self, "_engine", None)) is not None and self._failure is None:
            await engine.stop(0.0)
        if (seeing := getattr(self, "_seeing", None)) is not None:
            await seeing.close()


def _checkpoint(config: ModelConfig, home: Path, report: Reporting | None) -> tuple[Path | None, int]:
    """The folder on this machine and its time of release. Blocking; a hub model that is missing here is downloaded."""
    if config.backend == "fake":
        return None, 0
    from sakuradite.hub.resolve import resolve
    from sakuradite.hub.transfer import silent

    found = resolve(
        config.model, revision=config.revision, offline=config.offline, home=home, progress=report or silent
    )
    return found.path, found.created


def _on_this_node(error: APIError) -> APIError:
    """The error with the node's name: files are on one node and not on another."""
    record = error.record()
    return error_from_record(dataclasses.replace(record, message=f"on node {node_name()}: {record.message}"))


def resident_bytes(able: ModelCapabilities | None) -> dict[str, int]:
    """Memory of this process by what holds it."""
    import psutil  # type: ignore[import-untyped]  # brought by ray

    sizes = {"process": int(psutil.Process().memory_info().rss)}
    if able is not None and able.weight_bytes is not None:
        sizes["weights"] = able.weight_bytes
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        sizes["device"] = torch.cuda.memory_reserved()
    return sizes


def set_threads(num_cpus: float | None) -> None:
    """OMP_NUM_THREADS for the libraries that are imported next: an explicit one wins, then `num_cpus`, then all cores.

    Ray has already set it to the CPUs reserved, 1 for our default, so the raylet's own tells what was explicit.
    """
    if (explicit := _parent_environment("OMP_NUM_THREADS")) is not None:
        threads = explicit
    elif num_cpus is not None:
        threads = str(max(1, int(num_cpus)))
    else:
        threads = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    os.environ["OMP_NUM_THREADS"] = threads


def _parent_environment(name: str) -> str | None:
    """A variable of the process that started this one, None where it is unset or cannot be read (macOS)."""
    try:
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{name}=".encode()
    return next((entry[len(prefix) :].decode() for entry in entries if entry.startswith(prefix)), None)


async def _end_with_owner(owner: str) -> None:
    """On a Ray that lives longer than the client: delete the client's application when its process is gone."""
    import ray
    from ray import serve

    application = serve.get_replica_context().app_name
    while True:
        await asyncio.sleep(10)
        with suppress(ray.exceptions.RayError):
            if await asyncio.to_thread(job_is_dead, owner):
                await asyncio.to_thread(serve.delete, application, False)
                return


def job_is_dead(job_id: str) -> bool:
    """Whether Ray has seen the end of a driver, by its job's id in hex (a private call of Ray's; a test watches it)."""
    import ray

    return any(job["JobID"] == job_id and job["IsDead"] for job in ray._private.state.jobs())
