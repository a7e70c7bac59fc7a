"""Builders of Serve applications: what `serve deploy`, KubeRay, the daemon and embedded clients put on a cluster.

    import_path: sakuradite.cluster.application:model
    args: {config: {model: Qwen/Qwen3-0.6B}}

Classes travel by import path, so every node needs the package. Arguments are checked; a misspelt one is refused. No
`from __future__ import annotations` here: Serve looks at the type of a builder's argument as it is.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sakuradite.cluster.handles import MODEL_DEPLOYMENT
from sakuradite.cluster.local import SERVE_ENVIRONMENT
from sakuradite.cluster.resources import NODE_ID_LABEL, actor_options
from sakuradite.cluster.scaling import model_scale, router_scale
from sakuradite.config import ModelConfig, ServerConfig, home_directory
from sakuradite.http.keys import Keys, without_keys

if TYPE_CHECKING:
    from ray.serve import Application

SERVER = "sakuradite"
"""The application of router and catalog; each model is one of its own."""
ROUTER_DEPLOYMENT = "Router"
CATALOG_DEPLOYMENT = "Catalog"

MAX_ONGOING_CALLS = 10_000
"""Serve's own limit is out of the way: the engine admits by requests and bytes and says so with its own error."""
HEAD_RESOURCE = "node:__internal_head__"
"""Ray's own, 1.0 on the head node."""
HEALTH_PERIOD_SECONDS = 5.0
HEALTH_TIMEOUT_SECONDS = 10.0
"""A process that is frozen, or whose event loop is held, is replaced after three of these; a forward holds no loop."""


class ModelArguments(BaseModel):
    """Arguments of `model`: the model's configuration, and the home on the nodes.

    Without one each node has its own: SAKURADITE_HOME where its Ray was started, else ~/.sakuradite.
    """

    model_config = ConfigDict(extra="forbid")

    config: ModelConfig
    home: str | None = None


def model(arguments: ModelArguments) -> "Application":
    """The application of one model, for `import_path` in a Serve config."""
    return model_application(arguments.config, None if arguments.home is None else Path(arguments.home))


def model_application(
    config: ModelConfig,
    home: Path | None,
    *,
    options: dict[str, Any] | None = None,
    environment: bool = True,
    owner: str | None = None,
    logs: dict[str, Any] | None = None,
    drain: float = 120.0,
    own_stores: bool = False,
    operation: str | None = None,
) -> "Application":
    """A model as a Serve application.

    `home` is where each node keeps models; None, and with `own_stores` before it, is what the node itself says: see
    `node_home`. `options` replaces the scheduling request that follows from the config. `environment` brings what our
    processes need in their environment, for a Ray that was not started with it. `owner` is the job whose end ends the
    model. `logs` are arguments of `log_settings`, for where the replicas' own environment does not say how to log.
    `operation` is the load that hears of the replicas' downloads.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from sakuradite.cluster.model import Model

    actor = _with_environment(actor_options(config) if options is None else options, environment)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*metrics_interval_s", DeprecationWarning)  # there is no other way per model
        deployment = serve.deployment(
            name=MODEL_DEPLOYMENT,
            ray_actor_options=actor,
            max_ongoing_requests=MAX_ONGOING_CALLS,
            graceful_shutdown_timeout_s=drain,
            request_router_config=RequestRouterConfig(request_router_class="sakuradite.cluster.directed:Directed"),
            max_constructor_retry_count=1,  # it reports its own failure; only a process that cannot start comes here
            **_COMMON,
            **model_scale(config.replicas),
        )(Model)
    place = None if home is None else str(home)
    application: Application = deployment.bind(
        config.model_dump(mode="json"), place, owner, logs, own_stores, operation
    )
    return application


NOT_HERE = {
    "host": "Serve's proxy listens; set http_options.host of the Serve config",
    "port": "Serve's proxy listens; set http_options.port of the Serve config",
    "address": "the config is deployed on the cluster that it is sent to",
    "api_key": "a Serve config is no secret; set SAKURADITE_API_KEY in the environment of Ray's processes",
    "admin_key": "a Serve config is no secret; set SAKURADITE_ADMIN_KEY in the environment of Ray's processes",
}
"""Fields of ServerConfig that mean nothing, or too much, in a Serve config."""


class ServerArguments(BaseModel):
    """Arguments of `server`: a ServerConfig without keys and address; models are applications of their own.

    Keys come from the environment of the router's process (SAKURADITE_API_KEY, SAKURADITE_ADMIN_KEY), never from here.
    """

    model_config = ConfigDict(extra="forbid")

    config: ServerConfig = ServerConfig()
    num_cpus: float = Field(default=0.0, ge=0)
    """What each router asks the scheduler for. Above 0 none is put on a head node that offers no CPU."""

    @field_validator("config")
    @classmethod
    def _only_what_has_effect(cls, config: ServerConfig) -> ServerConfig:
        for name in sorted(config.model_fields_set & set(NOT_HERE)):
            raise ValueError(f"{name} cannot be set here: {NOT_HERE[name]}")
        return config


def server(arguments: ServerArguments) -> "Application":
    """Router and catalog behind Serve's own proxy, for `import_path` in a Serve config (Kubernetes)."""
    return server_beside(arguments)


def server_beside(arguments: ServerArguments, *models: "Application") -> "Application":
    """`server` with models in the same application, for `serve run` of a module that builds them. One of each name."""
    from ray import serve

    from sakuradite.cluster.ingress import Ingress

    config = arguments.config
    home, _ = home_directory(config.home)
    settings = _settings(config, home)
    deployment = serve.deployment(
        name=ROUTER_DEPLOYMENT,
        **router_scale(config.routers),
        ray_actor_options=_with_environment({"num_cpus": arguments.num_cpus}, True),
        max_ongoing_requests=config.max_pending_requests,
        max_constructor_retry_count=3,  # without a key it never comes up, and says so
        **_COMMON,
        graceful_shutdown_timeout_s=config.drain_timeout,
    )(Ingress)
    # On the head node, where it finds its files again: another node's home knows nothing of the models it loaded.
    catalog = _catalog(settings, home, {"num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}}, True)
    application: Application = deployment.bind(settings, catalog, *models)
    return application


def server_application(config: ServerConfig, keys: Keys, home: Path, *, node: str | None) -> "Application":
    """Routers that listen themselves, and the catalog: what `sakuradite serve` deploys.

    `node` is the id of the Ray node that they have to run on (where `host` and `home` are; of routers on every node
    only the catalog), None on our own Ray. On a joined Ray our processes bring their environment along.
    """
    from ray import serve

    from sakuradite.cluster.router import Router

    joined = node is not None
    here = {"num_cpus": 0} | ({"label_selector": {NODE_ID_LABEL: node}} if joined else {})
    settings = _settings(config, home)
    catalog = _catalog(settings, home, here, joined, own_stores=joined)
    deployment = serve.deployment(
        name=ROUTER_DEPLOYMENT,
        **router_scale(config.routers),
        ray_actor_options=_with_environment({"num_cpus": 0} if config.routers == "node" else here, joined),
        max_ongoing_requests=MAX_ONGOING_CALLS,
        graceful_shutdown_timeout_s=config.drain_timeout + 5,
        **_COMMON,
    )(Router)
    application: Application = deployment.bind(settings, keys, catalog)
    return application


_COMMON: dict[str, Any] = {
    "logging_config": {"enable_access_log": False},  # a line for every call, an eighth of a replica's work at full load
    "graceful_shutdown_wait_loop_s": 0.1,
    "health_check_period_s": HEALTH_PERIOD_SECONDS,
    "health_check_timeout_s": HEALTH_TIMEOUT_SECONDS,
}


def _settings(config: ServerConfig, home: Path) -> dict[str, Any]:
    """The configuration as it travels: no key in it, its home spelt out."""
    return without_keys(config).model_copy(update={"home": home}).model_dump(mode="json")


def _catalog(
    settings: dict[str, Any], home: Path, actor: dict[str, Any], environment: bool, own_stores: bool = False
) -> "Application":
    from ray import serve

    from sakuradite.cluster.catalog import Catalog

    deployment = serve.deployment(
        name=CATALOG_DEPLOYMENT,
        num_replicas=1,
        ray_actor_options=_with_environment(actor, environment),
        max_ongoing_requests=MAX_ONGOING_CALLS,
        graceful_shutdown_timeout_s=10,
        **_COMMON,
    )(Catalog)
    application: Application = deployment.bind(settings, str(home), own_stores)
    return application


def _with_environment(actor: dict[str, Any], environment: bool) -> dict[str, Any]:
    return {**actor, "runtime_env": {"env_vars": SERVE_ENVIRONMENT}} if environment else dict(actor)
