"""Serve configs, read strictly: `serve deploy` and KubeRay drop a misspelt key without a word, here it is a problem.

    problems("deployments/local.yaml", text)  ->  ["applications[1].args.config.max_batch_sise: unknown; ..."]

Reads a config file, or the `serveConfigV2` of every RayService in a Kubernetes manifest.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic import ValidationError as PydanticValidationError

from sakuradite.cluster import application
from sakuradite.cluster.handles import MODEL_DEPLOYMENT
from sakuradite.config import ENVIRONMENT

MAX_VALUES = 100_000
"""Of a file, each alias counted as what it stands for: aliases of aliases would keep the reader busy for years."""
MAX_LEVELS = 100
KEYS = {ENVIRONMENT["api_key"], ENVIRONMENT["admin_key"]}
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|OTLP(_TRACES)?_HEADERS"
    r"|(API|ACCESS|ACCOUNT|ADMIN|AUTH|ENCRYPTION|MASTER|PRIVATE|SECRET|SIGNING)_?KEY)$",
    re.IGNORECASE,
)
"""Environment variables that hold a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, REDIS_PASSWORD; not HF_TOKEN_PATH."""
SECRET_VALUE = re.compile(r"\bhf_[A-Za-z0-9]{30,}|://(?!git@)[^/\s@$]+@")
"""A token of the hub's, or a URL with a password or a token in it."""
REFERENCE = re.compile(r"\$\{\w+\}|\$\(\w+\)")
"""To a variable of the node, which Ray puts there, or of the pod, which Kubernetes does."""
NO_SECRETS = (
    "a secret has no place in a config, which Ray's dashboard shows to all; "
    "set it in the environment of Ray's processes on each node, in pods from a Secret"
)
BUILDERS: dict[Any, set[str]] = {
    application.server: {application.ROUTER_DEPLOYMENT, application.CATALOG_DEPLOYMENT},
    application.model: {MODEL_DEPLOYMENT},
}
"""Our builders and the deployments that each makes."""


@dataclass(frozen=True)
class ServeConfig:
    """One Serve config: `place` is where in the file it stands (empty for the file itself), `content` what it says."""

    place: str
    content: Any


def serve_configs(text: str) -> list[ServeConfig]:
    """The Serve configs of a file. Raises ValueError for what is no YAML, has a key twice, is endless, or has none."""
    return _configs(_documents(text))


def _documents(text: str) -> list[Any]:
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    _refuse_endless(documents)
    return documents


def _configs(documents: list[Any]) -> list[ServeConfig]:
    found = []
    for number, document in enumerate(documents):
        if not isinstance(document, dict):
            raise ValueError(f"document {number + 1} is no mapping")
        if document.get("kind") == "RayService":
            place, spec = f"{_name(document)}.spec.serveConfigV2", document.get("spec")
            embedded = spec.get("serveConfigV2") if isinstance(spec, dict) else None
            if not isinstance(embedded, str):
                raise ValueError(f"{place}: a text is expected (serveConfigV2: |)")
            found += [ServeConfig(place, config.content) for config in serve_configs(embedded)]
        elif "kind" not in document:
            found.append(ServeConfig("", document))
    if not found:
        raise ValueError("no Serve config and no RayService in it")
    return found


def _name(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    return str((metadata.get("name") if isinstance(metadata, dict) else None) or "RayService")


def _refuse_endless(documents: list[Any]) -> None:
    """Raise ValueError where there are more values than a config can need, aliases spelt out, or more levels."""
    left, level = MAX_VALUES, list[Any]([documents])
    for _ in range(MAX_LEVELS):
        below = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for value in chain.from_iterable(below) if isinstance(value, dict | list)]
        left -= sum(map(len, level))
        if left < 0:
            raise ValueError(f"more than {MAX_VALUES:,} values, each alias counted as what it stands for")
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_LEVELS} levels, or an alias within what it stands for")


def problems(text: str) -> list[str]:
    """What is wrong with the Serve configs of a file, each with its place in it; empty where `serve deploy` may go.

    Of a RayService also secrets in plain text in the environment of its pods.
    """
    try:
        configs = _configs(documents := _documents(text))
    except ValueError as error:
        return [str(error)]
    found = [f"{config.place}: {problem}".removeprefix(": ") for config in configs for problem in _problems(config)]
    return found + [p for document in documents if document.get("kind") == "RayService" for p in _in_pods(document)]


def _problems(config: ServeConfig) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Ray's own modules, fatal under `python -W error`
        from ray.serve.schema import ServeDeploySchema

    content = config.content
    unknown = list(_unknown(content, ServeDeploySchema, ""))
    yield from unknown
    try:
        schema = ServeDeploySchema.model_validate(content)
    except PydanticValidationError as error:
        yield from _invalid(error, "")
        return  # what follows reads the config as a valid one
    yield from _secrets(content, "")
    models: dict[str, str] = {}
    timeout = schema.http_options.request_timeout_s
    for number, declared in enumerate(content["applications"]):
        place = f"applications[{number}]"
        made = yield from _application(declared, place)
        if not isinstance(made, application.ModelArguments):
            continue
        name = made.config.model
        if name in models:
            yield f"{place}.args.config.model: {name} is declared by {models[name]} already; raise its replicas"
        models[name] = place
        if timeout is not None and timeout < made.config.timeout:
            yield (
                f"http_options.request_timeout_s: {timeout:g} s is below the deadline of {name} "
                f"({made.config.timeout:g} s); leave it out, the deadline is kept by the model"
            )


def _application(declared: dict[str, Any], place: str) -> Any:
    """Yields the problems of one application, and gives its arguments where they are understood."""
    path = declared["import_path"]
    try:
        builder = _import(path)
    except Exception as error:  # a module may fail in any way
        yield f"{place}.import_path: {path} cannot be imported here: {error}"
        return None
    if unfit := _unfit(builder):
        yield f"{place}.import_path: {path} is {unfit}; Serve takes an application, or a function of one argument"
        return None
    if isinstance(builder, types.FunctionType) and (known := BUILDERS.get(builder)) is not None:
        for number, deployment in enumerate(declared.get("deployments") or []):
            if deployment["name"] not in known:
                yield (
                    f"{place}.deployments[{number}].name: this application has no deployment {deployment['name']!r}; "
                    f"it has {', '.join(sorted(known))}"
                )
    arguments = _argument(builder)
    if arguments is None:
        return None
    given = declared.get("args") or {}
    found = list(_unknown(given, arguments, f"{place}.args."))
    yield from found
    try:
        return arguments.model_validate(given)
    except PydanticValidationError as error:
        yield from (p for p in _invalid(error, f"{place}.args.") if p.partition(": ")[0] not in _places(found))
        return None


def _places(found: list[str]) -> set[str]:
    return {problem.partition(": ")[0] for problem in found}


def _import(path: str) -> Any:
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _unfit(builder: Any) -> str | None:
    """What an import path leads to that Serve cannot deploy; None for what it can."""
    from ray.serve import Application

    if isinstance(builder, types.FunctionType):
        count = len(inspect.signature(builder).parameters)
        return None if count == 1 else f"a function of {count} arguments"
    return None if isinstance(builder, Application) else f"of type {type(builder).__name__}"


def _argument(builder: Callable[..., Any]) -> type[BaseModel] | None:
    """The pydantic model that a builder takes, None where it takes a plain dict or is an application itself."""
    if not isinstance(builder, types.FunctionType):
        return None
    parameters = list(inspect.signature(builder).parameters.values())  # as Serve looks at it
    kind = parameters[0].annotation if len(parameters) == 1 else None
    return kind if inspect.isclass(kind) and issubclass(kind, BaseModel) else None


def _unknown(value: Any, kind: Any, place: str) -> Iterator[str]:
    """Keys of a mapping that no pydantic model in its annotation has, all the way down."""
    if isinstance(value, list):
        (items,) = get_args(kind)[:1] or (Any,)
        for number, item in enumerate(value):
            yield from _unknown(item, items, f"{place.removesuffix('.')}[{number}].")
        return
    models = list(_models(kind))
    if not isinstance(value, dict) or not models:
        return
    fields = {f.alias or name: f.annotation for model in models for name, f in model.model_fields.items()}
    for key, below in value.items():
        if key == "runtime_env" and key in fields:
            yield from _wrong_in_runtime_env(below, f"{place}{key}.")
        elif key in fields:
            yield from _unknown(below, _items(fields[key], below), f"{place}{key}.")
        else:
            yield f"{place}{key}: unknown{_meant(str(key), fields)}"


def _wrong_in_runtime_env(value: Any, place: str) -> Iterator[str]:
    from ray.runtime_env import RuntimeEnv

    known = RuntimeEnv.known_fields
    for key in value if isinstance(value, dict) else ():
        if key not in known:
            yield f"{place}{key}: unknown{_meant(str(key), known)}"
    if not isinstance(value, dict) or (variables := value.get("env_vars")) is None:
        return
    if not isinstance(variables, dict):
        yield f"{place}env_vars: a mapping of names to texts is expected"
        return
    for name, text in variables.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            yield f"{place}env_vars.{name}: a text is expected; put it in quotes"


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        yield kind
    elif get_origin(kind) in (Union, types.UnionType):
        for option in get_args(kind):
            yield from _models(option)


def _items(kind: Any, value: Any) -> Any:
    """Of a union the list, for a list."""
    if isinstance(value, list) and get_origin(kind) in (Union, types.UnionType):
        return next((option for option in get_args(kind) if get_origin(option) is list), kind)
    return kind


def _meant(key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, [str(name) for name in known], n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(map(str, known)))}"


def _invalid(error: PydanticValidationError, place: str) -> Iterator[str]:
    for one in error.errors(include_input=False, include_url=False):
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"]).removeprefix(".")
        yield f"{place}{where}".removesuffix(".") + f": {one['msg']}"


def _secrets(value: Any, place: str) -> Iterator[str]:
    """Keys, tokens and passwords written into a config, which everybody who reaches Ray's dashboard can read."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _secrets(item, f"{place.removesuffix('.')}[{number}].")
    elif isinstance(value, dict):
        variables = place.endswith("env_vars.")
        for key, below in value.items():
            if key in KEYS or (variables and _is_secret(str(key), below)):
                yield f"{place}{key}: {NO_SECRETS}"
            else:
                yield from _secrets(below, f"{place}{key}.")
    elif isinstance(value, str) and SECRET_VALUE.search(value):
        yield f"{place.removesuffix('.')}: {NO_SECRETS}"


def _in_pods(document: dict[str, Any]) -> Iterator[str]:
    """Secrets in the environment of a manifest's pods, which everybody who reads the file can read."""

    def look(value: Any, place: str) -> Iterator[str]:
        for key, below in enumerate(value) if isinstance(value, list) else value.items():
            where = f"{place}[{key}]" if isinstance(value, list) else f"{place}.{key}"
            if not isinstance(below, list | dict):
                continue
            if isinstance(value, list) and place.endswith(".env") and isinstance(below, dict):
                name, text = str(below.get("name")), str(below.get("value") or "")
                if _is_secret(name, text) or SECRET_VALUE.search(text):
                    yield f"{where}: {name} is a secret; take it from one (valueFrom: {{secretKeyRef: ...}})"
            yield from look(below, where)

    yield from look(document, _name(document))


def _is_secret(name: str, value: Any) -> bool:
    """Whether an environment variable holds a secret in plain text, and not nothing or a reference to another."""
    return bool(SECRET_NAME.search(name) and value and not REFERENCE.fullmatch(str(value)))


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping: of the two the last would win without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a list or a mapping is no key", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
