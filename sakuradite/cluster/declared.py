"""Models that somebody else put on the cluster, by a Serve config: found by looking, served like loaded ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sakuradite.cluster import deploy
from sakuradite.cluster.calls import MODEL_DEPLOYMENT, ModelCalls
from sakuradite.config import ModelConfig
from sakuradite.operations import ModelCapabilities

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0


@dataclass(frozen=True)
class DeclaredModel:
    """A model of an application that is not ours to unload."""

    application: str
    config: ModelConfig
    capabilities: ModelCapabilities
    created: int


class DeclaredModels:
    """The declared models by id. `follow` keeps them up to date and calls `changed`."""

    def __init__(self, own: Callable[[], set[str]], changed: Callable[[], None]) -> None:
        """`own` names the applications that the catalog itself deployed."""
        self._own, self._changed = own, changed
        self.models: dict[str, DeclaredModel] = {}
        self._known: dict[str, DeclaredModel | None] = {}

    async def follow(self) -> None:
        """Look every few seconds. Ends only by cancellation."""
        while True:
            try:
                await self._look()
            except Exception as error:  # the controller may be restarting
                log.warning("cannot look for models on Serve: %s", type(error).__name__)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        there = await deploy.in_thread(running_models) - self._own()
        known = {name: model for name, model in self._known.items() if name in there}
        for name in there - set(known):
            known[name] = await self._describe(name)
        if known != self._known:
            self._known = known
            self.models = {m.config.model: m for m in known.values() if m is not None}
            self._changed()

    async def _describe(self, application: str) -> DeclaredModel | None:
        """None for an embedded client's own model, or one that could not load."""
        calls = ModelCalls(application, 30.0)
        try:
            async with asyncio.timeout(30):
                found = await calls.describe()
        finally:
            await calls.close()
        if found["owner"] is not None or found["failure"] is not None:
            return None
        return DeclaredModel(application, found["config"], found["capabilities"], found["created"])


def running_models() -> set[str]:
    """The applications with a model of ours in them that runs. Blocks."""
    from ray import serve

    return {
        name
        for name, application in serve.status().applications.items()
        if application.status == "RUNNING" and MODEL_DEPLOYMENT in application.deployments
    }
