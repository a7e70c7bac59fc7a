"""`Administration` for the HTTP application, asked of the catalog; it outlives a catalog that is being replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sakuradite.config import ModelConfig
from sakuradite.errors import ReplicaUnavailableError, error_from_record
from sakuradite.operations import Alias, Inspection, ModelStatus, Operation, Removed

PATIENCE_SECONDS = 10.0
"""A catalog that died is back within some 3 s."""
RETRY_SECONDS = 0.5


class RemoteAdministration:
    """The catalog's answers, its errors raised."""

    def __init__(self, catalog: Any) -> None:
        """`catalog` is a Serve handle."""
        self._catalog = catalog

    async def _ask(self, question: str, *arguments: Any) -> Any:
        reply = await patiently(lambda: self._catalog.ask.remote(question, *arguments))
        if reply.error is not None:
            raise error_from_record(reply.error)
        return reply.value

    async def models(self) -> Sequence[ModelStatus]:
        answer: Sequence[ModelStatus] = await self._ask("models")
        return answer

    async def inspect(self, model: str, revision: str | None, offline: bool) -> Inspection:
        answer: Inspection = await self._ask("inspect", model, revision, offline)
        return answer

    async def pull(self, model: str, revision: str | None, offline: bool) -> Operation:
        answer: Operation = await self._ask("pull", model, revision, offline)
        return answer

    async def load(self, config: ModelConfig) -> Operation:
        answer: Operation = await self._ask("load", config)
        return answer

    async def unload(self, model: str) -> ModelStatus:
        answer: ModelStatus = await self._ask("unload", model)
        return answer

    async def remove(self, model: str) -> Removed:
        answer: Removed = await self._ask("remove", model)
        return answer

    async def operations(self) -> Sequence[Operation]:
        answer: Sequence[Operation] = await self._ask("operations")
        return answer

    async def operation(self, operation_id: str) -> Operation:
        answer: Operation = await self._ask("operation", operation_id)
        return answer

    async def aliases(self) -> Sequence[Alias]:
        answer: Sequence[Alias] = await self._ask("aliases")
        return answer

    async def set_alias(self, alias: str, model: str) -> Alias:
        answer: Alias = await self._ask("set_alias", alias, model)
        return answer

    async def delete_alias(self, alias: str) -> Alias:
        answer: Alias = await self._ask("delete_alias", alias)
        return answer


async def patiently(call: Any) -> Any:
    """The result of a call to a replica that may just be replaced. All that is asked of the catalog may be repeated."""
    from ray.exceptions import RayActorError

    clock = asyncio.get_running_loop().time
    end = clock() + PATIENCE_SECONDS
    while True:
        try:
            return await call()
        except RayActorError:
            if clock() >= end:
                raise ReplicaUnavailableError("the catalog cannot be reached", retry_after=RETRY_SECONDS) from None
            await asyncio.sleep(RETRY_SECONDS)
