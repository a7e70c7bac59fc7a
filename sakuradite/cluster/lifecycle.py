"""Pull, load, unload and remove: one Serve application per model, one operation per pull or load.

Everything runs on the catalog's event loop; what blocks (downloads, Serve's own calls) runs in threads. The state of a
model is in its `ModelRecord`, written to disk with every change, so that a new catalog takes over where one died.
Long because the operations share one table of models and must see each other's steps.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sakuradite.cluster import deploy
from sakuradite.cluster.application import model_application
from sakuradite.cluster.calls import ModelCalls
from sakuradite.cluster.journal import MAX_COMPLETED, History, Journal, ModelRecord
from sakuradite.cluster.local import node_id
from sakuradite.cluster.resources import (
    Demand,
    NoRoomNowError,
    autoscaler_groups,
    check_resources,
    cluster_nodes,
    first_replicas,
    needs,
    possible_nodes,
    replica_nodes,
)
from sakuradite.cluster.stores import node_home, remove_everywhere, travelling
from sakuradite.config import ModelConfig, ReplicaRange
from sakuradite.errors import (
    APIError,
    CancelledOperationError,
    HubUnavailableError,
    InsufficientResourcesError,
    InternalError,
    InterruptedOperationError,
    InvalidLifecycleError,
    ModelNotFoundError,
    NotFoundError,
)
from sakuradite.operations import Operation, OperationError, Progress

log = logging.getLogger(__name__)

ACTIVE = ("pending", "running")
IGNORED = ("model", "offline")
"""Fields that say how to get a model, not what it is: they do not make two configurations differ."""
RESOLVED = ("backend", "device", "dtype")
"""Fields whose `auto` becomes something definite in a resident model."""

FREE_SECONDS = 5.0
"""How long a load waits for what others hold before it says so."""
LOOK_SECONDS = 0.5
STEP_SECONDS = 0.1
"""Between looks for a replica's place, which it has once its process is up."""
TOLD_SECONDS = 5.0
"""Without a place for so long a load says that it waits: the process alone takes a second or more to start."""
MAX_FREE_NAMES = 256
PLACE_SECONDS = 120.0
"""For replicas that should have room to get their places: others may have been quicker."""
AUTOSCALER_SECONDS = 1800.0
"""The same where an autoscaler starts machines: a GPU in a cloud takes minutes, if there is one."""


class Lifecycle:
    """The models of one cluster and what happened to them."""

    def __init__(
        self,
        journal: Journal,
        home: Path,
        session: str,
        drain: float,
        changed: Callable[[], None],
        published: Callable[[], Awaitable[None]],
        *,
        ended: Callable[[Operation], None] = lambda operation: None,
        logs: dict[str, Any] | None = None,
        own_stores: bool = False,
    ) -> None:
        """`changed` is called when what routers need to know is different; `published` returns when they know it. With
        `own_stores` the nodes keep models as `node_home` says.

        `ended` is called with each operation that has ended, `logs` says how models log: see `model_application`.
        Raises what `Journal.read` raises.
        """
        self._journal, self._home, self._drain, self._own_stores = journal, home, drain, own_stores
        self.store_home = node_home(str(home), own_stores)
        """The home in which this node keeps models."""
        self._changed, self._published = changed, published
        self._ended, self._logs = ended, logs
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False
        self._scheduling = asyncio.Lock()
        self._free_names: dict[str, str] = {}
        """By model the Serve application that it had and that is gone, lest Ray has to keep something of every load."""
        self.state, history = journal.read()
        self.operations = {operation.id: operation for operation in history.operations}
        if self.state.session == session:
            self._take_over()
        else:
            self._after_crash()
            self.state.session = session
            self._save()

    @property
    def models(self) -> dict[str, ModelRecord]:
        """The records by model id, in the order of loading."""
        return self.state.models

    # -- what an administrator asks for

    def load(self, config: ModelConfig) -> Operation:
        """Begin to load, or the operation of the same configuration that is on its way or resident.

        Raises InvalidLifecycleError when the model is resident with another configuration, InsufficientStorageError
        where it cannot be written down.
        """
        self._check_open()
        model = canonical(config.model)
        config = config.model_copy(update={"model": model})
        record = self.models.get(model)
        if record is not None and record.state == "draining":
            raise InvalidLifecycleError(f"{model} is being unloaded; load it again when it is gone", param="model")
        if record is not None and record.state in ("loading", "ready"):
            if different := differences(config, record):
                raise InvalidLifecycleError(
                    f"{model} is {record.state} with another {', '.join(different)}; unload it first",
                    param=different[0],
                )
            return self.operations.get(record.operation.id, record.operation)
        operation = self._new("load", model)
        self.models.pop(model, None)  # so that the order is that of loading
        application = self._free_names.pop(model, None) or application_name(model, operation.id)
        self.models[model] = ModelRecord(config=config, state="loading", application=application, operation=operation)
        self._save()
        self._run(operation.id, self._load(model, operation.id))
        return operation

    def pull(self, model: str, revision: str | None, offline: bool) -> Operation:
        """Begin to download, or the operation that downloads the same already."""
        self._check_open()
        model = canonical(model)
        key = f"{model}@{revision or ''}"
        for operation in self.operations.values():
            if operation.kind == "pull" and operation.status in ACTIVE and (operation.result or {}).get("key") == key:
                return operation
        operation = self._new("pull", model, {"key": key})
        self._run(operation.id, self._pull(model, revision, offline, operation.id))
        return operation

    async def unload(self, model: str) -> None:
        """Return when the model is gone: a load is cancelled, running requests are drained first.

        Raises ModelNotFoundError for one that is neither resident nor known.
        """
        record = self.models.get(canonical(model))
        if record is None:
            raise ModelNotFoundError(f"{model} is not loaded", param="model")
        model = record.config.model
        key = f"unload {model}"
        if key not in self._tasks:
            self._run(key, self._unload(model, record))
        await asyncio.shield(self._tasks[key])

    async def remove(self, model: str) -> None:
        """Delete a managed checkpoint. Raises InvalidLifecycleError while it is resident, ModelNotFoundError."""
        model = canonical(model)
        record = self.models.get(model)
        if record is not None and record.state not in ("unloaded", "failed"):
            raise InvalidLifecycleError(f"{model} is {record.state}; unload it first", param="model")
        if any(o.model == model and o.status in ACTIVE for o in self.operations.values()):
            raise InvalidLifecycleError(f"{model} is being downloaded", param="model")
        if self._own_stores:
            await deploy.in_thread(lambda: remove_everywhere(model, travelling(self._home)))
        else:
            from sakuradite.hub.store import Store

            await deploy.in_thread(lambda: Store(self.store_home).remove(model))
        if self.models.pop(model, None) is not None:
            self._save()

    def operation(self, operation_id: str) -> Operation:
        """Raises NotFoundError for an id that was never given or has been forgotten."""
        if (operation := self.operations.get(operation_id)) is None:
            raise NotFoundError("no such operation; the latest 256 completed ones are kept", param="operation_id")
        return operation

    def restore(self) -> list[Operation]:
        """Load again what was resident when an earlier cluster ended."""
        wanted = [r.config for r in self.models.values() if r.state == "unloaded" and r.loaded_at is not None]
        return [self.load(config) for config in wanted]

    async def close(self) -> None:
        """Cancel what is under way. What was resident stays written down for `restore`."""
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- how it is done

    async def _load(self, model: str, operation_id: str) -> None:
        record = self.models[model]
        calls: ModelCalls | None = None
        try:
            self._progress(operation_id, Progress(phase="resolving"))
            with suppress(NoRoomNowError):  # what no node can hold is not downloaded first
                await deploy.in_thread(lambda: check_resources(record.config))
            config = await self._fetch(record, operation_id)
            self._progress(operation_id, Progress(phase="scheduling"))
            options = await self._options(record, config, operation_id)
            build = partial(
                model_application,
                config,
                Path(travelling(self._home)) if self._own_stores else self._home,
                options=options,
                drain=self._drain,
                logs=self._logs,
                own_stores=self._own_stores,
                operation=operation_id if self._own_stores else None,
            )
            await deploy.to_the_end(deploy.in_thread(lambda: deploy.submit_once(record.application, build)))
            await self._place(record, operation_id)
            self._progress(operation_id, Progress(phase="loading"))
            calls = ModelCalls(record.application, config.timeout)
            record.capabilities = await deploy.wait_until_ready(record.application, calls, first_replicas(config))
            record.state, record.loaded_at, record.last_error = "ready", time.time(), None
            self._save()
            await self._published()  # who sees the operation succeed finds the model at every router
        except asyncio.CancelledError:
            await deploy.to_the_end(self._undo(record))
            self._end_load(record, operation_id, CancelledOperationError("cancelled by an unload or a shutdown"))
            raise
        except APIError as error:
            await self._undo(record)
            self._end_load(record, operation_id, error)
        except Exception as error:
            log.exception("loading %s failed", model)
            await self._undo(record)
            self._end_load(record, operation_id, InternalError(f"loading failed: {type(error).__name__}: {error}"))
        else:
            self._end_load(record, operation_id, None)
        finally:
            if calls is not None:
                await calls.close()

    async def _options(self, record: ModelRecord, config: ModelConfig, operation_id: str) -> dict[str, Any]:
        """What to ask the scheduler for, unless an earlier catalog has asked already.

        What is merely taken is waited for: while another model is being unloaded, and a moment longer, because Ray
        learns late of what was given back.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + FREE_SECONDS
        while True:
            async with self._scheduling:  # two loads at once must not both be promised the last GPU
                if record.application in await deploy.in_thread(deploy.applications):
                    return {}
                others = self._others(record, await deploy.in_thread(replica_nodes))
                try:
                    options = await deploy.in_thread(lambda: check_resources(config, others))  # noqa: B023
                except NoRoomNowError as error:
                    lacking = error
                else:
                    record.asked = needs(options)
                    return options
            if any(other.state == "draining" for other in self.models.values()):
                end = clock() + FREE_SECONDS
            if clock() > end:
                raise lacking
            self._progress(operation_id, Progress(phase="waiting", reason=lacking.message))
            await asyncio.sleep(LOOK_SECONDS)

    def _others(self, but: ModelRecord, placed: dict[str, tuple[str, ...]]) -> list[Demand]:
        """What all other models hold or have been told that they get."""
        demands = []
        for record in self.models.values():
            if record is but or record.state not in ("loading", "ready", "draining"):
                continue
            scaled = record.config.replicas if isinstance(record.config.replicas, ReplicaRange) else None
            replicas = scaled.min if scaled and record.state == "ready" else first_replicas(record.config)
            demands.append(Demand(record.asked, record.config.placement, replicas, placed.get(record.application, ())))
        return demands

    async def _place(self, record: ModelRecord, operation_id: str) -> None:
        """Return when the first replicas have places, or Serve has given up; the operation tells what it waits for.

        Raises InsufficientResourcesError when they do not get them in the time that there is for it.
        """
        clock = asyncio.get_running_loop().time
        begun = clock()
        replicas = first_replicas(record.config)
        while len((await deploy.in_thread(replica_nodes)).get(record.application, ())) < replicas:
            if await deploy.in_thread(lambda: deploy.failure(record.application)) is not None:
                return  # whoever waits for its answer tells why
            wanted = Demand(record.asked, record.config.placement, replicas)
            limit = AUTOSCALER_SECONDS if await deploy.in_thread(autoscaler_groups) else PLACE_SECONDS
            if clock() - begun > limit:
                raise InsufficientResourcesError(f"the nodes had no room within {limit:g} s: needed {wanted}")
            if clock() - begun > TOLD_SECONDS:
                self._progress(operation_id, Progress(phase="waiting", reason=f"no place yet for {wanted}"))
            await asyncio.sleep(STEP_SECONDS)

    async def _fetch(self, record: ModelRecord, operation_id: str) -> ModelConfig:
        """The files on this machine, if a replica may run on it, and the configuration with their commit.

        Other nodes fetch that commit themselves.
        """
        config = record.config
        record.created = int(time.time())
        if config.backend == "fake":
            return config
        if not await deploy.in_thread(lambda: self._may_run_here(config)):
            record.revision = await deploy.in_thread(lambda: self._commit(config))
            return config.model_copy(update={"revision": record.revision})
        from sakuradite.hub.resolve import resolve

        checkpoint = await self._with_progress(
            operation_id,
            lambda progress: resolve(
                config.model, revision=config.revision, offline=config.offline, home=self.store_home, progress=progress
            ),
        )
        record.revision, record.path = checkpoint.revision, str(checkpoint.path)
        record.managed, record.created = checkpoint.managed, checkpoint.created
        return config.model_copy(update={"revision": checkpoint.revision})

    def _may_run_here(self, config: ModelConfig) -> bool:
        nodes = cluster_nodes()
        return len(nodes) == 1 or node_id() in [node.id for node in possible_nodes(config, nodes)]

    def _commit(self, config: ModelConfig) -> str | None:
        """What the revision of a hub model stands for now, so that all nodes fetch the same; None for a path."""
        from sakuradite.hub.names import check_revision, is_hub_id
        from sakuradite.hub.remote import Hub

        if config.offline or not is_hub_id(config.model):
            return config.revision
        try:
            return Hub().snapshot(config.model, check_revision(config.revision)).commit
        except HubUnavailableError:  # the node may have it
            return config.revision

    async def _with_progress(self, operation_id: str, work: Callable[[Callable[[Progress], None]], Any]) -> Any:
        """Run hub work in a thread, its progress shown on the operation; a cancellation stops it at the next report."""
        loop, stopped = asyncio.get_running_loop(), False

        def report(progress: Progress) -> None:
            if stopped:
                raise CancelledOperationError("cancelled by an unload or a shutdown")
            loop.call_soon_threadsafe(self._progress, operation_id, progress)

        try:
            return await deploy.in_thread(lambda: work(report))
        except asyncio.CancelledError:
            stopped = True
            raise

    def _end_load(self, record: ModelRecord, operation_id: str, error: APIError | None) -> None:
        model = record.config.model
        if error is None:
            result = {"model": model, "revision": record.revision}
            self._finish(operation_id, "succeeded", result=result)
        elif isinstance(error, CancelledOperationError):
            self.models.pop(model, None)
            self._finish(operation_id, "cancelled", error=error)
        else:
            record.state = "failed"
            self._finish(operation_id, "failed", error=error)
            record.last_error = self.operations[operation_id].error
        record.operation = self.operations[operation_id]
        self._save()

    async def _undo(self, record: ModelRecord) -> None:
        with suppress(Exception):  # it may not have come to exist; the operation's own error is what counts
            await deploy.in_thread(lambda: deploy.delete(record.application, drain=False))
            self._free_name(record)

    def _free_name(self, record: ModelRecord) -> None:
        """The application is gone, so the next load of the model may have its name."""
        self._free_names[record.config.model] = record.application
        if len(self._free_names) > MAX_FREE_NAMES:
            del self._free_names[next(iter(self._free_names))]

    async def _pull(self, model: str, revision: str | None, offline: bool, operation_id: str) -> None:
        from sakuradite.hub.names import local_path
        from sakuradite.hub.resolve import resolve
        from sakuradite.hub.store import Store

        def work(progress: Callable[[Progress], None]) -> Any:
            if local_path(model):
                return resolve(model, revision=revision, home=self.store_home, progress=progress)
            return Store(self.store_home).pull(model, revision, offline, progress)

        try:
            self._progress(operation_id, Progress(phase="resolving"))
            found = await self._with_progress(operation_id, work)
        except asyncio.CancelledError:
            self._finish(operation_id, "cancelled", error=CancelledOperationError("cancelled by a shutdown"))
            raise
        except APIError as error:
            self._finish(operation_id, "failed", error=error)
        except Exception as error:
            log.exception("pulling %s failed", model)
            self._finish(operation_id, "failed", error=InternalError(f"{type(error).__name__}: {error}"))
        else:
            self._finish(operation_id, "succeeded", result={"model": model, "revision": found.revision})

    async def _unload(self, model: str, record: ModelRecord) -> None:
        loading = self._tasks.get(record.operation.id)
        if loading is not None:
            loading.cancel()
            await asyncio.wait([loading])
        if record.state in ("ready", "draining"):
            record.state = "draining"
            self._save()
            await self._published()  # from here on no router sends it a request
            await deploy.in_thread(lambda: deploy.delete(record.application))
            self._free_name(record)
        self.models.pop(model, None)  # what is on disk is in the store's list; nothing else is left to tell
        self._save()

    # -- the books

    def _take_over(self) -> None:
        """A catalog of this very cluster died: go on with what it was doing."""
        for model, record in self.models.items():
            if record.state == "loading":
                self._run(record.operation.id, self._load(model, record.operation.id))
            elif record.state == "draining":
                self._run(f"unload {model}", self._unload(model, record))
        for operation in list(self.operations.values()):
            if operation.kind == "pull" and operation.status in ACTIVE:
                _, _, revision = (operation.result or {}).get("key", "").rpartition("@")
                self._run(operation.id, self._pull(operation.model, revision or None, False, operation.id))

    def _after_crash(self) -> None:
        """The cluster of these books is gone: nothing is resident, and what was under way was cut off."""
        error = InterruptedOperationError("cut off when the daemon ended; start it again")
        for operation in list(self.operations.values()):
            if operation.status in ACTIVE:
                self._finish(operation.id, "failed", error=error)
        for record in self.models.values():
            if record.state in ("loading", "ready", "draining"):
                record.operation = self.operations.get(record.operation.id, record.operation)
                record.last_error, record.capabilities = record.operation.error, None
                record.loaded_at = record.loaded_at if record.state == "ready" else None
                record.state = "failed" if record.state == "loading" else "unloaded"

    def _new(self, kind: str, model: str, result: dict[str, Any] | None = None) -> Operation:
        operation = Operation.model_validate(
            {
                "id": f"op_{secrets.token_hex(12)}",
                "kind": kind,
                "model": model,
                "created": time.time(),
                "result": result,
            }
        )
        self.operations[operation.id] = operation
        try:
            self._save_history(strictly=True)
        except APIError:
            del self.operations[operation.id]
            raise
        return operation

    def report(self, operation_id: str, progress: Progress) -> None:
        """What a replica on another node tells of its download."""
        operation = self.operations.get(operation_id)
        if operation is not None and operation.progress.phase in ("loading", "downloading", "converting"):
            self._progress(operation_id, progress)

    def _progress(self, operation_id: str, progress: Progress) -> None:
        operation = self.operations.get(operation_id)
        if operation is not None and operation.status in ACTIVE:
            self.operations[operation_id] = operation.model_copy(update={"status": "running", "progress": progress})

    def _finish(
        self, operation_id: str, status: str, result: dict[str, Any] | None = None, error: APIError | None = None
    ) -> None:
        operation = self.operations[operation_id]
        changes: dict[str, Any] = {"status": status, "result": result, "finished": time.time()}
        if error is not None:
            changes["error"] = OperationError(code=error.code, message=error.message, status_code=error.status)
        else:
            changes["progress"] = operation.progress.model_copy(update={"phase": "done"})
        self.operations[operation_id] = operation.model_copy(update=changes)
        self._ended(self.operations[operation_id])
        completed = [o for o in self.operations.values() if o.status not in ACTIVE]
        completed.sort(key=lambda o: o.finished or 0)
        for old in completed[:-MAX_COMPLETED]:
            del self.operations[old.id]
        self._save_history()

    def _run(self, key: str, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _check_open(self) -> None:
        if self._closing:
            raise InvalidLifecycleError("the server is shutting down")

    def set_alias(self, alias: str, model: str | None) -> None:
        """Point an alias at a model, or with None take it away."""
        before = dict(self.state.aliases)
        if model is None:
            del self.state.aliases[alias]
        else:
            self.state.aliases[alias] = canonical(model)
        try:
            self._journal.write_state(self.state)
        except APIError:
            self.state.aliases = before
            raise
        self._changed()

    def _save(self) -> None:
        """Write the models down. Work that is under way does not end because the disk is full."""
        try:
            self._journal.write_state(self.state)
        except APIError as error:
            log.error("%s; the next change tries again", error.message)
        self._changed()

    def _save_history(self, strictly: bool = False) -> None:
        """Write the operations down; `strictly` raises where that fails, so that no new one begins."""
        try:
            self._journal.write_history(History(operations=list(self.operations.values())))
        except APIError as error:
            if strictly:
                raise
            log.error("%s; the next change tries again", error.message)


def canonical(model: str) -> str:
    """The id of a model: an existing local file or folder by its absolute path, anything else as it is."""
    from sakuradite.hub.names import local_path

    try:
        path = local_path(model)
    except APIError:  # a name that cannot be had; the operation that needs it says so
        return model
    return model if path is None else str(path)


def application_name(model: str, operation_id: str) -> str:
    """The name of the Serve application of a load: readable, and unlike that of any other load.

    Given again to the next load of the model only where this catalog has seen the application go: under the name of
    one that is still there, or on its way out, a load would take over its replicas.
    """
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", model.rsplit("/", 1)[-1])[:40]
    return f"model-{slug}-{operation_id[-8:]}"


def differences(wanted: ModelConfig, record: ModelRecord) -> list[str]:
    """The fields in which a configuration differs from a resident one; `auto` and no revision match what is there."""
    return [name for name in type(wanted).model_fields if name not in IGNORED and not _same(name, wanted, record)]


def _same(name: str, wanted: ModelConfig, record: ModelRecord) -> bool:
    value = getattr(wanted, name)
    there: list[Any] = [getattr(record.config, name)]
    if name == "revision":
        return value is None or value in (*there, record.revision)
    if name in RESOLVED:
        if record.capabilities is not None:
            found: str = getattr(record.capabilities, name)
            there += [found, found.partition(":")[0]]  # "cuda" is what "cuda:0" was asked for
        return value == "auto" or value in there
    return bool(value == there[0])
