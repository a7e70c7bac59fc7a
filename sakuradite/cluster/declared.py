"""Models that somebody else put on the cluster, by a Serve config: found by looking, served like loaded ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError as PydanticValidationError

from sakuradite.cluster import deploy
from sakuradite.cluster.calls import ModelCalls
from sakuradite.cluster.handles import MODEL_DEPLOYMENT
from sakuradite.config import ModelConfig
from sakuradite.operations import ModelCapabilities, OperationError

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0
DESCRIBE_SECONDS = 30.0
"""A model that is scaled to zero starts a replica to describe itself; what takes longer is asked again."""
MODEL_BUILDER = "sakuradite.cluster.application:model"

type State = Literal["loading", "ready", "failed"]


@dataclass(frozen=True)
class DeclaredModel:
    """A model of an application that is not ours to unload. `capabilities` and `created` once it was ready."""

    application: str
    config: ModelConfig
    state: State
    capabilities: ModelCapabilities | None = None
    created: int = 0
    error: OperationError | None = None


@dataclass(frozen=True)
class Seen:
    """What Serve tells of an application with a model in it. `config` is None where no Serve config declared it."""

    status: str
    deployed: float
    message: str
    config: ModelConfig | None


class DeclaredModels:
    """The declared models by id. `follow` keeps them up to date and calls `changed`."""

    def __init__(self, own: Callable[[], set[str]], changed: Callable[[], None]) -> None:
        """`own` names the applications that the catalog itself deployed."""
        self._own, self._changed = own, changed
        self.models: dict[str, DeclaredModel] = {}
        self._known: dict[str, DeclaredModel | None] = {}
        """By application. None is an embedded client's, which is nobody else's business."""
        self._described: dict[str, float] = {}
        """When the deployment that an application described itself in was made."""
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def follow(self) -> None:
        """Look every few seconds. Ends only by cancellation."""
        while True:
            try:
                self.take(await deploy.in_thread(applications_with_models))
            except Exception as error:  # the controller may be restarting
                log.warning("cannot look for models on Serve: %s", type(error).__name__)
            await asyncio.sleep(LOOK_SECONDS)

    def take(self, seen: dict[str, Seen]) -> None:
        """Compare with what is known: forget what is gone, ask what came up to describe itself."""
        there = {name: s for name, s in seen.items() if name not in self._own() and s.status != "DELETING"}
        for name in set(self._known) - set(there):
            del self._known[name]
            self._described.pop(name, None)
        for name, application in there.items():
            if application.status == "RUNNING" and self._described.get(name) != application.deployed:
                if application.config is not None and self._answered_with(name) == application.config:
                    self._described[name] = application.deployed  # asking would wake one that is scaled to zero
                elif name not in self._asking:
                    self._asking[name] = asyncio.ensure_future(self._ask(name, application.deployed))
            elif application.status != "RUNNING":
                self._wait(name, application)
        self._publish()

    def _answered_with(self, name: str) -> ModelConfig | None:
        """The configuration with which an application's model was ready."""
        known = self._known.get(name)
        return known.config if known is not None and known.state == "ready" else None

    def _wait(self, name: str, seen: Seen) -> None:
        """One that does not run yet, or no longer: what answered goes on as it is, since its replicas may."""
        before, wanted = self._known.get(name), seen.config
        if wanted is None:  # of somebody else's builder: it says what it is when it runs
            return
        if before is not None:
            if before.state == "ready" and before.config.model == wanted.model:
                return
            if before.state == "failed" and before.config == wanted:  # it knows the cause better than Serve
                return
        self._described.pop(name, None)
        state: State = "failed" if seen.status in ("DEPLOY_FAILED", "UNHEALTHY") else "loading"
        error = OperationError(code="model_load_failed", message=seen.message or seen.status, status_code=503)
        self._known[name] = DeclaredModel(name, wanted, state, error=error if state == "failed" else None)

    async def _ask(self, name: str, deployed: float) -> None:
        calls = ModelCalls(name, DESCRIBE_SECONDS)
        try:
            async with asyncio.timeout(DESCRIBE_SECONDS):
                found = await calls.describe()
        except Exception as error:  # it is asked again at the next look
            log.warning("%s does not describe itself: %s", name, type(error).__name__)
            return
        finally:
            del self._asking[name]
            await calls.close()
        self._known[name] = _declared(name, found)
        if found["failure"] is None:
            self._described[name] = deployed  # else Serve starts another replica, and that may do better
        self._publish()

    def _publish(self) -> None:
        models = {model.config.model: model for model in self._known.values() if model is not None}
        if models != self.models:
            self.models = models
            self._changed()


def _declared(application: str, found: dict[str, Any]) -> DeclaredModel | None:
    """What `Model.describe` told."""
    if found["owner"] is not None:
        return None
    failure = found["failure"]
    return DeclaredModel(
        application,
        found["config"],
        "ready" if failure is None else "failed",
        found["capabilities"],
        found["created"],
        OperationError(code=failure.code, message=failure.message, status_code=failure.status) if failure else None,
    )


def applications_with_models() -> dict[str, Seen]:
    """The applications with a model of ours in them, or about to have one. Blocks."""
    configs = declared_configs()
    return {
        name: Seen(
            str(application.status.value),
            application.last_deployed_time_s,
            " ".join(filter(None, [application.message, *(d.message for d in application.deployments.values())])),
            configs.get(name),
        )
        for name, application in deploy.status().items()
        if name in configs or MODEL_DEPLOYMENT in application.deployments
    }


def declared_configs() -> dict[str, ModelConfig]:
    """By application: the model of the Serve config that was deployed last, running or not.

    Serve tells it by a private call only; tests/deployments watches that.
    """
    from ray.serve.context import _get_global_client

    from sakuradite.cluster.application import ModelArguments

    client = _get_global_client(raise_if_no_controller_running=False)
    found = {}
    for name, details in (client.get_serve_details()["applications"] if client is not None else {}).items():
        declared = details.get("deployed_app_config") or {}
        if declared.get("import_path") != MODEL_BUILDER:
            continue
        try:
            found[name] = ModelArguments.model_validate(declared.get("args", {})).config
        except PydanticValidationError:  # Serve's own status tells, and nothing of it runs
            continue
    return found
