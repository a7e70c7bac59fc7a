"""The catalog: one replica beside the routers that holds aliases, models and operations, and tells routers of changes.

It answers administration with values (`Reply`), because Ray wraps exceptions. A new one takes over where one died.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakuradite.cluster import deploy
from sakuradite.cluster.declared import DeclaredModel, DeclaredModels
from sakuradite.cluster.journal import Journal, ModelRecord
from sakuradite.cluster.lifecycle import Lifecycle, canonical
from sakuradite.cluster.seeing import Seeing
from sakuradite.cluster.table import Entry, Table
from sakuradite.config import ModelConfig, ReplicaRange, ServerConfig, log_settings
from sakuradite.errors import (
    APIError,
    ErrorRecord,
    InvalidLifecycleError,
    ModelNotFoundError,
    NotFoundError,
    ValidationError,
)
from sakuradite.http.gateway import ResidentModel
from sakuradite.operations import (
    Alias,
    Inspection,
    ModelState,
    ModelStatus,
    Operation,
    OperationError,
    Progress,
    Removed,
    ReplicaCounts,
    StorageStatus,
)

WATCH_SECONDS = 20.0
"""A watch without a change answers after this, so that a router notices a catalog that is gone."""
PUBLISH_SECONDS = 2.0
MAX_ALIAS_LENGTH = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of administration, or the error that it is."""

    value: Any = None
    error: ErrorRecord | None = None


async def replied(answer: Awaitable[Any]) -> Reply:
    """The answer as a value, an APIError too. Anything else is a defect and goes its way."""
    try:
        return Reply(await answer)
    except APIError as error:
        return Reply(error=error.record())


class Catalog:
    """The Serve deployment. `ask` is all of administration, `watch` what routers follow."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it; the event loop is needed
        self, settings: dict[str, Any], home: str, own_stores: bool = False
    ) -> None:
        self._settings = ServerConfig.model_validate(settings)
        self._home = Path(home)
        self._version = 0
        self._routers: dict[str, tuple[int, float]] = {}
        self._change, self._heard = asyncio.Event(), asyncio.Event()
        logs = {name: settings[name] for name in ("log_format", "log_level", "log_dir")}
        self._seeing = Seeing("catalog", log_settings(**logs))
        self._lifecycle = Lifecycle(
            Journal(self._home),
            self._home,
            session_name(),
            self._settings.drain_timeout,
            self._changed,
            self._published,
            ended=self._ended,
            logs=logs,
            own_stores=own_stores,
        )
        self._seeing.meters.refresh(self._look)
        self._declared = DeclaredModels(self._own_applications, self._changed)
        self._looking = asyncio.ensure_future(self._declared.follow())

    # -- for routers and the daemon

    async def watch(self, router: str, version: int) -> Table:
        """The table, as soon as it is another than the `version` that this router has, or some time has passed."""
        self._routers[router] = version, asyncio.get_running_loop().time()
        self._heard.set()
        if self._version == version:
            change = self._change
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await change.wait()
            except TimeoutError:
                pass
        return self._table()

    async def ask(self, question: str, *arguments: Any) -> Reply:
        """One method of `Administration` by name."""
        answer: Awaitable[Any] = getattr(self, f"_{question}")(*arguments)
        return await replied(answer)

    async def report(self, operation: str, progress: Progress) -> None:
        """How far a replica is with its download."""
        self._lifecycle.report(operation, progress)

    async def settings(self) -> dict[str, Any]:
        """What this server was started with, without keys."""
        return self._settings.model_dump(mode="json")

    async def restore(self) -> list[Operation]:
        """Load again what was resident when the last cluster of this home ended."""
        return self._lifecycle.restore()

    async def close(self) -> list[str]:
        """Cancel what is under way; the Serve applications of the models that are left, for the daemon to delete."""
        await self._lifecycle.close()
        return [r.application for r in self._lifecycle.models.values() if r.state in ("ready", "draining")]

    async def figures(self) -> Any:
        """What this catalog counted, for `/metrics`."""
        return self._seeing.figures()

    def _ended(self, operation: Operation) -> None:
        """Count an operation that ended, and write its line."""
        self._seeing.meters["sakuradite_operations_total"].labels(operation.kind, operation.status).inc()
        fields: dict[str, Any] = {
            "operation": operation.id,
            "kind": operation.kind,
            "model": operation.model,
            "status": operation.status,
            "seconds": round((operation.finished or operation.created) - operation.created, 3),
        }
        if operation.error is not None:
            fields["code"] = operation.error.code
        log.info("operation", extra={"fields": fields})

    def _look(self) -> None:
        """Set the gauges of what there is, loaded or declared."""
        meters, records, declared = self._seeing.meters, self._lifecycle.models, self._only_declared()
        known: dict[str, ModelRecord | DeclaredModel] = {**records, **declared}
        states = Counter(found.state for found in known.values())
        for state in ("loading", "ready", "draining", "failed"):
            meters["sakuradite_models"].labels(state).set(states[state])
        wanted = meters["sakuradite_replicas_wanted"]
        wanted.clear()
        for model, found in known.items():
            if found.state != "ready":
                continue
            replicas = found.config.replicas
            wanted.labels(model).set(replicas.min if isinstance(replicas, ReplicaRange) else replicas)

    async def __del__(self) -> None:
        if (seeing := getattr(self, "_seeing", None)) is not None:
            await seeing.close()

    async def check_health(self) -> None:
        """Raises when declared models are no longer looked for."""
        if self._looking.done():
            raise RuntimeError("the catalog no longer looks for declared models")

    def _own_applications(self) -> set[str]:
        return {record.application for record in self._lifecycle.models.values()}

    def _changed(self) -> None:
        self._version += 1
        self._change.set()
        self._change = asyncio.Event()

    async def _published(self) -> None:
        """Return when every router that asked lately has the table of this moment; a dead one delays it a little."""
        version, clock = self._version, asyncio.get_running_loop().time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PUBLISH_SECONDS):
                while any(v < version and clock() - at < 2 * WATCH_SECONDS for v, at in self._routers.values()):
                    self._heard.clear()
                    await self._heard.wait()

    def _only_declared(self) -> dict[str, DeclaredModel]:
        """The declared models by id, but for those that are loaded as well: the loaded one serves, and is ours."""
        loaded = self._lifecycle.models
        resident = {m for m, record in loaded.items() if record.state in ("loading", "ready", "draining")}
        return {m: found for m, found in self._declared.models.items() if m not in resident}

    def _table(self) -> Table:
        loaded, declared = self._lifecycle.models, self._only_declared()
        entries = {
            model: Entry(
                record.state,
                record.application,
                record.config.timeout,
                record.config.cold_start,
                load=record.operation.id,
            )
            for model, record in loaded.items()
        }
        for model, found in declared.items():
            entries[model] = Entry(found.state, found.application, found.config.timeout, found.config.cold_start)
        aliases_set = dict(self._lifecycle.state.aliases)
        bare = Table(self._version, entries, aliases_set, self._settings.default_model)
        names = bare.names()
        for model, found in declared.items():
            if found.state == "ready" and found.capabilities is not None:
                aliases = tuple(sorted(a for a, m in names.items() if m == model and a != "default"))
                resident = ResidentModel(model, found.created, found.capabilities, aliases)
                entries[model] = dataclasses.replace(entries[model], resident=resident)
        for model, record in loaded.items():
            if record.state == "ready" and record.capabilities is not None:
                aliases = tuple(sorted(a for a, m in names.items() if m == model and a != "default"))
                resident = ResidentModel(model, record.created, record.capabilities, aliases)
                entries[model] = dataclasses.replace(entries[model], resident=resident)
        return bare

    # -- administration

    async def _models(self) -> list[ModelStatus]:
        stored = await deploy.in_thread(self._stored)
        counts = await deploy.in_thread(replica_counts)
        records, declared = self._lifecycle.models, self._only_declared()
        ours = {m: None for m in (*records, *stored) if m not in declared}
        return [self._status(m, records.get(m), stored.get(m), counts) for m in ours] + [
            ModelStatus(
                model=model,
                status=found.state,
                config=found.config,
                capabilities=found.capabilities,
                replicas=counts.get(found.application, (ReplicaCounts(), None))[0],
                storage=stored.get(model),
                aliases=self._aliases_of(model),
                last_error=found.error or unwell(found.state, counts.get(found.application)),
            )
            for model, found in declared.items()
        ]

    def _stored(self) -> dict[str, StorageStatus]:
        from sakuradite.hub.store import Store

        return {
            m.model: StorageStatus(
                managed=True, path=str(m.path), bytes=m.bytes, revision=m.revision, complete=m.complete
            )
            for m in Store(self._lifecycle.store_home).list()
        }

    def _status(
        self,
        model: str,
        record: ModelRecord | None,
        storage: StorageStatus | None,
        counts: dict[str, tuple[ReplicaCounts, str | None]],
    ) -> ModelStatus:
        aliases = self._aliases_of(model)
        if record is None:
            return ModelStatus(model=model, status="unloaded", storage=storage, aliases=aliases)
        if storage is None and record.path is not None:
            storage = StorageStatus(managed=record.managed, path=record.path, revision=record.revision)
        replicas, _ = counts.get(record.application, (ReplicaCounts(), None))
        return ModelStatus(
            model=model,
            status=record.state,
            config=record.config,
            capabilities=record.capabilities,
            replicas=replicas,
            storage=storage,
            aliases=aliases,
            operation_id=record.operation.id,
            last_error=record.last_error or unwell(record.state, counts.get(record.application)),
            loaded_at=record.loaded_at,
        )

    def _aliases_of(self, model: str) -> tuple[str, ...]:
        return tuple(sorted(a for a, m in self._lifecycle.state.aliases.items() if m == model))

    async def _inspect(self, model: str, revision: str | None, offline: bool) -> Inspection:
        from sakuradite.hub.inspect import inspect

        home = self._lifecycle.store_home
        return await deploy.in_thread(lambda: inspect(model, revision=revision, offline=offline, home=home))

    async def _pull(self, model: str, revision: str | None, offline: bool) -> Operation:
        return self._lifecycle.pull(model, revision, offline)

    def _refuse_declared(self, model: str) -> None:
        if (found := self._only_declared().get(canonical(model))) is not None:
            raise InvalidLifecycleError(
                f"{model} is declared by the Serve application {found.application!r}; change it in the Serve config "
                "and deploy that again",
                param="model",
            )

    async def _load(self, config: ModelConfig) -> Operation:
        self._refuse_declared(config.model)
        operation = self._lifecycle.load(config)
        await self._published()  # so that a decision that comes next hears "loading", not "unknown"
        return operation

    async def _unload(self, model: str) -> ModelStatus:
        model = canonical(self._table().names().get(model, model))
        self._refuse_declared(model)
        await self._lifecycle.unload(model)
        stored = await deploy.in_thread(self._stored)
        return self._status(model, self._lifecycle.models.get(model), stored.get(model), {})

    async def _remove(self, model: str) -> Removed:
        self._refuse_declared(model)
        await self._lifecycle.remove(model)
        return Removed(model=model)

    async def _operations(self) -> list[Operation]:
        return list(self._lifecycle.operations.values())

    async def _operation(self, operation_id: str) -> Operation:
        return self._lifecycle.operation(operation_id)

    async def _aliases(self) -> list[Alias]:
        return [Alias(alias=alias, model=model) for alias, model in sorted(self._lifecycle.state.aliases.items())]

    async def _set_alias(self, alias: str, model: str) -> Alias:
        if not alias or len(alias) > MAX_ALIAS_LENGTH or not alias.isprintable():
            raise ValidationError(f"an alias has 1 to {MAX_ALIAS_LENGTH} printable characters", param="alias")
        if alias in self._lifecycle.models or alias in self._declared.models:
            raise ValidationError("an alias must not be the id of a model", param="alias")
        if model in self._lifecycle.state.aliases:
            raise ValidationError("an alias names a model, not another alias", param="model")
        known = {*self._lifecycle.models, *self._declared.models, *await deploy.in_thread(self._stored)}
        if canonical(model) not in known:
            raise ModelNotFoundError(f"{model} is neither loaded nor downloaded", param="model")
        self._lifecycle.set_alias(alias, model)
        await self._published()
        return Alias(alias=alias, model=canonical(model))

    async def _delete_alias(self, alias: str) -> Alias:
        model = self._lifecycle.state.aliases.get(alias)
        if model is None:
            raise NotFoundError(f"there is no alias {alias!r}", param="alias")
        self._lifecycle.set_alias(alias, None)
        await self._published()
        return Alias(alias=alias, model=model)


def session_name() -> str:
    """The name of the Ray session: another after every start of a cluster (a private attribute; a test watches it)."""
    from ray._private.worker import global_worker

    return str(global_worker.node.session_name)


def unwell(state: ModelState, counts: tuple[ReplicaCounts, str | None] | None) -> OperationError | None:
    """What Serve says of a model that was ready and has no replica that is."""
    if state != "ready" or counts is None or counts[1] is None:
        return None
    return OperationError(code="replica_unavailable", message=counts[1], status_code=503)


def replica_counts() -> dict[str, tuple[ReplicaCounts, str | None]]:
    """By Serve application: replicas wanted and answering, and what Serve says when it is not well. Blocks."""
    found: dict[str, tuple[ReplicaCounts, str | None]] = {}
    for name, application in deploy.status().items():
        states = [d.replica_states for d in application.deployments.values()]
        target = sum(n for s in states for state, n in s.items() if state not in ("STOPPING", "DRAINING"))
        counts = ReplicaCounts(target=target, ready=sum(s.get("RUNNING", 0) for s in states))
        unwell = application.status in ("UNHEALTHY", "DEPLOY_FAILED")
        messages = " ".join(d.message for d in application.deployments.values() if d.message)
        found[name] = counts, (messages or str(application.status)) if unwell else None
    return found
