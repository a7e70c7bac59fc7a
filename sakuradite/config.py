"""Settings: a model's, the server's, the client's, and the one place that reads the environment and config.toml."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic import ValidationError as PydanticValidationError

from sakuradite.errors import ConfigurationError

type BackendName = Literal["auto", "torch", "mlx", "fake"]
type LogFormat = Literal["text", "json"]
type LogLevel = Literal["debug", "info", "warning", "error"]
DEFAULT_PORT = 7777
DEFAULT_BASE_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
MiB = 1 << 20


class ReplicaRange(BaseModel):
    """Autoscaling: between `min` and `max` replicas, by the number of requests that wait or run. 0 is allowed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min: int = Field(default=1, ge=0)
    max: int = Field(ge=1)
    target: float = Field(default=16.0, gt=0)
    """Requests per replica to aim at."""
    up_after: float = Field(default=30.0, ge=0)
    """Seconds that more than the target must last before there are more replicas; from none it is at once."""
    down_after: float = Field(default=600.0, ge=0)
    """Seconds that less must last before there are fewer."""

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaRange:
        if self.min > self.max:
            raise ValueError(f"replicas.min ({self.min}) is above replicas.max ({self.max})")
        return self


class ModelConfig(BaseModel):
    """What to load and within which limits. Two loads with equal configurations are the same operation.

    `model` is a hub id, or the path of a checkpoint folder or a GGUF file on the machine that loads it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    revision: str | None = None
    backend: BackendName = "auto"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    offline: bool = False

    max_input_tokens: int = Field(default=8192, ge=1)
    """Tokens of one question's whole prompt; never above what the checkpoint was built for."""
    max_questions: int = Field(default=400, ge=1)
    max_pending_requests: int = Field(default=128, ge=1)
    max_pending_bytes: int = Field(default=128 * MiB, ge=1)
    max_batch_size: int = Field(default=16, ge=1)
    """Rows of one forward."""
    max_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens that one forward computes, padding included. A longer row runs alone."""
    max_batch_seconds: float | None = Field(default=None, gt=0)
    """Seconds after which one batch counts as stuck and its replica is replaced; None: five times `timeout`."""
    max_cache_bytes: int | None = Field(default=None, ge=0)
    """Bytes of key/value caches that requests may hold between their batches; None: a share of the device's memory."""
    compile: bool = False
    """PyTorch: compile the layers (CUDA graphs on a GPU) and fill forwards up to a few sizes. Loading takes longer."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds from admission to the last answer."""

    replicas: Annotated[int, Field(ge=1)] | ReplicaRange = 1
    num_gpus: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    num_cpus: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory: int | None = Field(default=None, ge=1)
    """Bytes of main memory to ask the scheduler for."""
    resources: dict[str, float] = Field(default_factory=dict)
    placement: dict[str, str] = Field(default_factory=dict)
    """Node labels that the replicas need, as `{"zone": "a"}`."""
    cold_start: Literal["wait", "reject"] = "wait"
    """With no replica up (scaled to zero) one is started: hold the request, or answer 503 with Retry-After."""


class ServerConfig(BaseModel):
    """The daemon: where it listens, whom it serves, and the limits of a request before it reaches a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    home: Path | None = None
    api_key: str | None = Field(default=None, repr=False)
    admin_key: str | None = Field(default=None, repr=False)
    address: str | None = None
    """A running Ray cluster to join ("auto", or an address); None starts Ray on this machine."""
    routers: Annotated[int, Field(ge=1)] | Literal["node"] = 1
    """So many on this machine, sharing the port; or "node": one on each machine of the cluster."""
    default_model: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_request_bytes: int = Field(default=32 * MiB, ge=1)
    max_pending_requests: int = Field(default=1024, ge=1)
    """Requests that one router holds at once, over all models."""
    stream_write_timeout: float = Field(default=30.0, gt=0)
    drain_timeout: float = Field(default=120.0, ge=0)
    log_format: LogFormat | None = None
    """Of the log lines; None: what SAKURADITE_LOG_FORMAT says, else text."""
    log_level: LogLevel | None = None
    """None: what SAKURADITE_LOG_LEVEL says, else info."""
    log_dir: Path | None = None
    """Where each process has its log file; `-` for stderr. None: SAKURADITE_LOG_DIR, else `logs` in the home of
    `sakuradite serve`, and stderr anywhere else."""


class LogSettings(BaseModel):
    """How one process logs. Without a directory it does so on stderr."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: LogFormat = "text"
    level: LogLevel = "info"
    directory: Path | None = None


ENVIRONMENT = {
    "home": "SAKURADITE_HOME",
    "model": "SAKURADITE_MODEL",
    "base_url": "SAKURADITE_BASE_URL",
    "api_key": "SAKURADITE_API_KEY",
    "admin_key": "SAKURADITE_ADMIN_KEY",
    "log_format": "SAKURADITE_LOG_FORMAT",
    "log_level": "SAKURADITE_LOG_LEVEL",
    "log_dir": "SAKURADITE_LOG_DIR",
}
SERVER_ENVIRONMENT = ("api_key", "admin_key", "log_format", "log_level", "log_dir")


@dataclass(frozen=True)
class ClientSettings:
    """What a client was told, after arguments, environment and config.toml were put in order.

    `origin` names for each value where it came from: "argument", an environment variable, the path of config.toml, or
    "default".
    """

    home: Path
    model: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    revision: str | None = None
    backend: BackendName = "auto"
    device: str = "auto"
    dtype: str = "auto"
    offline: bool = False
    timeout: float | None = None
    origin: Mapping[str, str] = field(default_factory=dict)


def home_directory(explicit: Path | str | None = None) -> tuple[Path, str]:
    """The home and where it was set: the argument, SAKURADITE_HOME, or ~/.sakuradite. Nothing is created."""
    if explicit is not None:
        return Path(explicit).expanduser().absolute(), "argument"
    if value := os.environ.get("SAKURADITE_HOME"):
        return Path(value).expanduser().absolute(), "SAKURADITE_HOME"
    return Path.home() / ".sakuradite", "default"


def read_config_file(home: Path) -> dict[str, Any]:
    """config.toml of a home as a dict, empty when there is none. Raises ConfigurationError naming file and place."""
    path = home / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None


CLIENT_KEYS = (
    "model", "base_url", "api_key", "admin_key", "revision", "backend", "device", "dtype", "offline", "timeout",
)  # fmt: skip


def client_settings(home: Path | str | None = None, **arguments: Any) -> ClientSettings:
    """Explicit arguments, then the environment, then config.toml, then defaults. An argument of None counts as absent.

    Raises ConfigurationError for a key or a value of config.toml that is not understood.
    """
    home_path, home_origin = home_directory(home)
    path = home_path / "config.toml"
    file = {key: value for key, value in read_config_file(home_path).items() if key != "server"}
    if unknown := sorted(set(file) - set(CLIENT_KEYS)):
        raise ConfigurationError(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(CLIENT_KEYS)}, [server]")
    values: dict[str, Any] = {}
    origin = {"home": home_origin}
    for key in CLIENT_KEYS:
        variable = ENVIRONMENT.get(key)
        if arguments.get(key) is not None:
            values[key], origin[key] = arguments[key], "argument"
        elif variable and os.environ.get(variable):
            values[key], origin[key] = os.environ[variable], variable
        elif key in file:
            values[key], origin[key] = file[key], str(path)
        else:
            origin[key] = "default"
    return ClientSettings(home=home_path, origin=origin, **values)


def server_settings(home: Path | str | None = None, **arguments: Any) -> ServerConfig:
    """ServerConfig in the same order: arguments, environment (keys, logs), config.toml's [server], defaults."""
    home_path, _ = home_directory(home)
    values = dict(read_config_file(home_path).get("server", {}))
    for key in SERVER_ENVIRONMENT:
        if value := os.environ.get(ENVIRONMENT[key]):
            values[key] = value
    values |= {key: value for key, value in arguments.items() if value is not None}
    values["home"] = home_path
    try:
        return ServerConfig.model_validate(values)
    except PydanticValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"[server] {where}: {first['msg']}", param=where) from None


def log_settings(
    log_format: LogFormat | None = None,
    log_level: LogLevel | None = None,
    log_dir: Path | str | None = None,
    *,
    default_level: LogLevel = "info",
) -> LogSettings:
    """How this process logs: as told, else as its environment says, else text on stderr.

    Raises ConfigurationError for a value of the environment that is not understood.
    """
    told = {"log_format": log_format, "log_level": log_level, "log_dir": log_dir}
    found = {name: value or os.environ.get(ENVIRONMENT[name]) or None for name, value in told.items()}
    directory = None if found["log_dir"] is None or str(found["log_dir"]) == "-" else Path(str(found["log_dir"]))
    try:
        return LogSettings.model_validate(
            {
                "format": found["log_format"] or "text",
                "level": found["log_level"] or default_level,
                "directory": directory and directory.expanduser().absolute(),
            }
        )
    except PydanticValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        variable = ENVIRONMENT[f"log_{first['loc'][0]}"]
        raise ConfigurationError(f"{variable}: {first['msg']}", param=variable) from None
