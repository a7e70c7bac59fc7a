"""What the HTTP application needs of the cluster, as protocols: it never sees Ray.

The router deployment implements them over Serve handles; tests implement them over an engine in the same process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sakuradite.config import ModelConfig
from sakuradite.operations import Alias, Inspection, ModelCapabilities, ModelStatus, Operation, Removed
from sakuradite.records import Outcome, RequestRecord


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """A model that is ready to answer."""

    id: str
    created: int
    """Seconds since the epoch of the checkpoint's files or release."""
    capabilities: ModelCapabilities
    aliases: tuple[str, ...] = ()


class Gateway(Protocol):
    """Inference: which models are there, and deciding with one."""

    def resident(self) -> Sequence[ResidentModel]:
        """The models that are ready, from memory (no round trip)."""

    def resolve(self, name: str) -> ResidentModel:
        """The model of an id or alias. Raises ModelNotFoundError, or ModelLoadingError while it is on its way."""

    def decide(self, model: ResidentModel, request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        """Outcomes in groups as rows finish, each row exactly once; a failure of the whole request is raised.

        Closing the generator early cancels the rows that have not started.
        """


class Administration(Protocol):
    """Lifecycle: everything under /admin/v1. Failures are raised as APIError."""

    async def models(self) -> Sequence[ModelStatus]: ...
    async def inspect(self, model: str, revision: str | None, offline: bool) -> Inspection: ...
    async def pull(self, model: str, revision: str | None, offline: bool) -> Operation: ...
    async def load(self, config: ModelConfig) -> Operation: ...
    async def unload(self, model: str) -> ModelStatus: ...
    async def remove(self, model: str) -> Removed: ...
    async def operations(self) -> Sequence[Operation]: ...
    async def operation(self, operation_id: str) -> Operation: ...
    async def aliases(self) -> Sequence[Alias]: ...
    async def set_alias(self, alias: str, model: str) -> Alias: ...
    async def delete_alias(self, alias: str) -> Alias: ...
