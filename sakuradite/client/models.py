"""`client.models`: what a daemon has stored and loaded, and changing it; the sync and the async face of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import orjson
from pydantic import BaseModel, TypeAdapter
from pydantic import ValidationError as PydanticValidationError

from sakuradite.client.http import HTTPTransport, parsed, within
from sakuradite.client.loop import Loop
from sakuradite.client.session import Session
from sakuradite.config import ModelConfig
from sakuradite.errors import (
    CancelledOperationError,
    ConfigurationError,
    ErrorRecord,
    ReplicaUnavailableError,
    TransportError,
    error_from_record,
)
from sakuradite.operations import Alias, Inspection, ModelStatus, Operation, Removed

FIRST_POLL = 0.1  # seconds between two looks at an operation, growing by half to
LAST_POLL = 1.0
ROUTER_AWAY = 30.0  # seconds that polling bears without an answer: operations survive a restart of the router

type OnProgress = Callable[[Operation], None]


class _Entry(BaseModel):
    id: str


class ModelNames(BaseModel):
    data: list[_Entry]


class Administration:
    """The requests behind both faces, in the client's loop."""

    def __init__(self, session: Session, remote: bool) -> None:
        self._session, self._remote = session, remote

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, params: dict[str, str] | None = None
    ) -> bytes:
        """The answer to one request under /admin/v1."""
        transport = await self._transport()
        content = None if body is None else orjson.dumps(body)
        return await self._session.track(transport.call(method, "/admin/v1" + path, "admin", content, params))

    async def _transport(self) -> HTTPTransport:
        """The connection to the daemon. Raises ConfigurationError for an embedded client, without starting it."""
        if not self._remote:
            raise ConfigurationError(
                "models are administered on a daemon, and this client is embedded: "
                "pass base_url=… to Sakuradite, or set SAKURADITE_BASE_URL"
            )
        transport = await self._session.open()
        assert isinstance(transport, HTTPTransport)
        return transport

    async def list(self) -> Sequence[ModelStatus]:
        return many(ModelStatus, await self.call("GET", "/models"))

    async def ready(self) -> Sequence[str]:
        transport = await self._transport()
        data = await self._session.track(transport.call("GET", "/v1/models", "inference"))
        return [entry.id for entry in parsed(ModelNames, data).data]

    async def inspect(self, model: str, revision: str | None, offline: bool) -> Inspection:
        return parsed(Inspection, await self.call("POST", "/models/inspect", _target(model, revision, offline)))

    async def pull(self, model: str, revision: str | None, offline: bool) -> Operation:
        return parsed(Operation, await self.call("POST", "/models/pull", _target(model, revision, offline)))

    async def load(self, config: ModelConfig | str) -> Operation:
        config = ModelConfig(model=config) if isinstance(config, str) else config
        return parsed(Operation, await self.call("POST", "/models/load", config.model_dump(mode="json")))

    async def unload(self, model: str) -> ModelStatus:
        return parsed(ModelStatus, await self.call("POST", "/models/unload", {"model": model}))

    async def remove(self, model: str) -> Removed:
        return parsed(Removed, await self.call("DELETE", "/models", params={"model": model}))

    async def operations(self) -> Sequence[Operation]:
        return many(Operation, await self.call("GET", "/operations"))

    async def operation(self, operation_id: str) -> Operation:
        return parsed(Operation, await self.call("GET", f"/operations/{quote(operation_id, safe='')}"))

    async def aliases(self) -> Sequence[Alias]:
        return many(Alias, await self.call("GET", "/aliases"))

    async def set_alias(self, alias: str, model: str) -> Alias:
        return parsed(Alias, await self.call("PUT", f"/aliases/{quote(alias, safe='')}", {"model": model}))

    async def delete_alias(self, alias: str) -> Alias:
        return parsed(Alias, await self.call("DELETE", f"/aliases/{quote(alias, safe='')}"))

    async def wait(
        self,
        operation: Operation | str,
        timeout: float | None,
        on_progress: OnProgress | None,
    ) -> Operation:
        id_ = operation if isinstance(operation, str) else operation.id
        return ended(await within(timeout, self._poll(id_, on_progress), what=f"operation {id_}"))

    async def _poll(self, id_: str, on_progress: OnProgress | None) -> Operation:
        clock = asyncio.get_running_loop().time
        pause, answered = FIRST_POLL, clock()
        while True:
            try:
                operation = await self.operation(id_)
                answered = clock()
            except (TransportError, ReplicaUnavailableError):
                if clock() - answered > ROUTER_AWAY:
                    raise
            else:
                if on_progress is not None:
                    on_progress(operation)
                if operation.status not in ("pending", "running"):
                    return operation
            await asyncio.sleep(pause)
            pause = min(LAST_POLL, pause * 1.5)


def ended(operation: Operation) -> Operation:
    """An operation that succeeded. Raises the APIError of one that did not, with its own code and status."""
    if operation.status == "succeeded":
        return operation
    error = operation.error
    if error is not None:
        raise error_from_record(ErrorRecord(error.code, error.status_code, error.message))
    raise CancelledOperationError(f"the {operation.kind} of {operation.model} was cancelled")


def many[M: BaseModel](model: type[M], data: bytes) -> list[M]:
    """A list of models out of an answer. Raises TransportError for what is none."""
    try:
        return TypeAdapter(list[model]).validate_json(data)  # type: ignore[valid-type]
    except PydanticValidationError:
        raise TransportError(f"the server's answer is not a list of {model.__name__}") from None


def _target(model: str, revision: str | None, offline: bool) -> dict[str, Any]:
    return {"model": model, "revision": revision, "offline": offline}


class Models:
    """The models of a daemon, as an open client gives them in `client.models`."""

    def __init__(self, session: Session, loop: Loop, remote: bool) -> None:
        self._admin, self._loop = Administration(session, remote), loop

    def list(self) -> Sequence[ModelStatus]:
        """Every stored and resident model."""
        return self._loop.wait(self._admin.list())

    def ready(self) -> Sequence[str]:
        """The names that `decide` takes as its model: loaded models and their aliases. Needs no admin key."""
        return self._loop.wait(self._admin.ready())

    def inspect(self, model: str, *, revision: str | None = None, offline: bool = False) -> Inspection:
        """Facts about a checkpoint, as its architecture and which backends can load it. No weights are read."""
        return self._loop.wait(self._admin.inspect(model, revision, offline))

    def pull(self, model: str, *, revision: str | None = None, offline: bool = False) -> Operation:
        """Start a download; returns at once. `wait` for it."""
        return self._loop.wait(self._admin.pull(model, revision, offline))

    def load(self, config: ModelConfig | str) -> Operation:
        """Start loading, downloading first if needed; returns at once. `wait` for it.

        The same configuration again gives the same operation; another one for a resident model is an
        InvalidLifecycleError.
        """
        return self._loop.wait(self._admin.load(config))

    def unload(self, model: str) -> ModelStatus:
        """Let running requests finish, then free the model's memory."""
        return self._loop.wait(self._admin.unload(model))

    def remove(self, model: str) -> Removed:
        """Delete the files of a model that is not loaded and that the daemon downloaded."""
        return self._loop.wait(self._admin.remove(model))

    def operations(self) -> Sequence[Operation]:
        """Pending and running operations, and the latest that ended."""
        return self._loop.wait(self._admin.operations())

    def operation(self, operation_id: str) -> Operation:
        """How an operation stands."""
        return self._loop.wait(self._admin.operation(operation_id))

    def wait(
        self,
        operation: Operation | str,
        *,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Wait for the end of an operation, with `on_progress` told how it stands.

        A failed one is raised as the APIError of its own code and status; after `timeout` seconds a
        RequestTimeoutError, and the operation goes on.
        """
        return self._loop.wait(self._admin.wait(operation, timeout, on_progress))

    def aliases(self) -> Sequence[Alias]:
        """The alias table; the alias `default` names the default model."""
        return self._loop.wait(self._admin.aliases())

    def set_alias(self, alias: str, model: str) -> Alias:
        """Let an alias name a model."""
        return self._loop.wait(self._admin.set_alias(alias, model))

    def delete_alias(self, alias: str) -> Alias:
        """Remove an alias."""
        return self._loop.wait(self._admin.delete_alias(alias))


class AsyncModels:
    """The models of a daemon, as coroutines; as `Models` otherwise."""

    def __init__(self, session: Session, loop: Loop, remote: bool) -> None:
        self._admin, self._loop = Administration(session, remote), loop

    async def list(self) -> Sequence[ModelStatus]:
        """Every stored and resident model."""
        return await self._loop.run(self._admin.list())

    async def ready(self) -> Sequence[str]:
        """The names that `decide` takes as its model: loaded models and their aliases. Needs no admin key."""
        return await self._loop.run(self._admin.ready())

    async def inspect(self, model: str, *, revision: str | None = None, offline: bool = False) -> Inspection:
        """Facts about a checkpoint, as its architecture and which backends can load it. No weights are read."""
        return await self._loop.run(self._admin.inspect(model, revision, offline))

    async def pull(self, model: str, *, revision: str | None = None, offline: bool = False) -> Operation:
        """Start a download; returns at once. `wait` for it."""
        return await self._loop.run(self._admin.pull(model, revision, offline))

    async def load(self, config: ModelConfig | str) -> Operation:
        """Start loading, downloading first if needed; returns at once. `wait` for it. See `Models.load`."""
        return await self._loop.run(self._admin.load(config))

    async def unload(self, model: str) -> ModelStatus:
        """Let running requests finish, then free the model's memory."""
        return await self._loop.run(self._admin.unload(model))

    async def remove(self, model: str) -> Removed:
        """Delete the files of a model that is not loaded and that the daemon downloaded."""
        return await self._loop.run(self._admin.remove(model))

    async def operations(self) -> Sequence[Operation]:
        """Pending and running operations, and the latest that ended."""
        return await self._loop.run(self._admin.operations())

    async def operation(self, operation_id: str) -> Operation:
        """How an operation stands."""
        return await self._loop.run(self._admin.operation(operation_id))

    async def wait(
        self,
        operation: Operation | str,
        *,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Wait for the end of an operation, with `on_progress` told how it stands. See `Models.wait`."""
        return await self._loop.run(self._admin.wait(operation, timeout, on_progress))

    async def aliases(self) -> Sequence[Alias]:
        """The alias table; the alias `default` names the default model."""
        return await self._loop.run(self._admin.aliases())

    async def set_alias(self, alias: str, model: str) -> Alias:
        """Let an alias name a model."""
        return await self._loop.run(self._admin.set_alias(alias, model))

    async def delete_alias(self, alias: str) -> Alias:
        """Remove an alias."""
        return await self._loop.run(self._admin.delete_alias(alias))
