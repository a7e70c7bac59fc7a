"""Builders of Serve applications: what `serve deploy`, KubeRay, the daemon and embedded clients put on a cluster.

    import_path: sakuradite.cluster.application:model
    args: {config: {model: Qwen/Qwen3-0.6B}}

Classes travel by import path, so every node needs the package. Arguments are checked; a misspelt one is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from sakuradite.cluster.calls import MODEL_DEPLOYMENT
from sakuradite.cluster.local import SERVE_ENVIRONMENT
from sakuradite.cluster.resources import actor_options
from sakuradite.config import ModelConfig, ReplicaRange, home_directory

if TYPE_CHECKING:
    from ray.serve import Application

MAX_ONGOING_CALLS = 10_000
"""Serve's own limit is out of the way: the engine admits by requests and bytes and says so with its own error."""
CALLS_PER_REPLICA = 4
"""Joined calls in flight per replica that autoscaling aims at."""
HEALTH_PERIOD_SECONDS = 5.0
HEALTH_TIMEOUT_SECONDS = 30.0


class ModelArguments(BaseModel):
    """Arguments of `model`: the model's configuration, and the home directory on the nodes (default ~/.sakuradite)."""

    model_config = ConfigDict(extra="forbid")

    config: ModelConfig
    home: str | None = None


def model(arguments: ModelArguments) -> Application:
    """The application of one model, for `import_path` in a Serve config."""
    home, _ = home_directory(arguments.home)
    return model_application(arguments.config, home)


def model_application(
    config: ModelConfig,
    home: Path,
    *,
    options: dict[str, Any] | None = None,
    environment: bool = True,
    owner: str | None = None,
    drain: float = 120.0,
) -> Application:
    """A model as a Serve application.

    `options` replaces the scheduling request that follows from the config. `environment` brings what our processes
    need in their environment, for a Ray that was not started with it. `owner` is the job whose end ends the model.
    """
    from ray import serve

    from sakuradite.cluster.model import Model

    scale: dict[str, Any]
    if isinstance(config.replicas, ReplicaRange):
        scale = {
            "autoscaling_config": {
                "min_replicas": config.replicas.min,
                "initial_replicas": max(1, config.replicas.min),
                "max_replicas": config.replicas.max,
                "target_ongoing_requests": CALLS_PER_REPLICA,
            }
        }
    else:
        scale = {"num_replicas": config.replicas}
    actor = dict(actor_options(config) if options is None else options)
    if environment:
        actor["runtime_env"] = {"env_vars": SERVE_ENVIRONMENT}
    deployment = serve.deployment(
        name=MODEL_DEPLOYMENT,
        ray_actor_options=actor,
        max_ongoing_requests=MAX_ONGOING_CALLS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain,
        max_constructor_retry_count=1,  # it reports its own failure; only a process that cannot start comes here
        health_check_period_s=HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        **scale,
    )(Model)
    application: Application = deployment.bind(config.model_dump(mode="json"), str(home), owner)
    return application
