"""Options that several commands share, and what they say about a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sakuradite.cli.exits import UsageError

if TYPE_CHECKING:
    from sakuradite.config import ModelConfig

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A hub id, or the path of a checkpoint where the daemon runs.")
]
Questions = Annotated[Path, typer.Option("--questions", "-q", metavar="FILE", help="A JSON map of questions by id.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else on stdout.")]
Revision = Annotated[str | None, typer.Option(metavar="REV", help="A branch, tag or commit of the hub.")]
Offline = Annotated[bool, typer.Option("--offline", help="Use local files only.")]
Backend = Annotated[str | None, typer.Option(metavar="NAME", help="auto, torch, mlx, or fake for a dry run.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str | None, typer.Option(metavar="NAME", help="auto, float32, bfloat16, float16.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other field of ModelConfig, as replicas=2. Repeatable."),
]


def checkpoint_name(model: str) -> str:
    """The name as the daemon is to know it: a path is made absolute, since the daemon works in another folder."""
    looks_local = model.startswith(("./", "../", "~", "/")) or model.endswith(".gguf")
    path = Path(model).expanduser()
    return str(path.absolute()) if looks_local and path.exists() else model


def named_model(model: str | None, home: Path | None, how: str) -> str:
    """The model that the command line or the settings name. Raises UsageError, which says `how` to name one."""
    from sakuradite.config import client_settings

    if (name := checkpoint_name(model) if model else client_settings(home).model) is None:
        raise UsageError(f"no model: name one ({how}), or set SAKURADITE_MODEL")
    return name


def model_config(model: str, settings: list[str] | None, **options: Any) -> ModelConfig:
    """The configuration of the loading options; those not given are left at their defaults. Raises UsageError."""
    from pydantic import ValidationError

    from sakuradite.config import ModelConfig

    values = {name: value for name, value in options.items() if value not in (None, False)}
    for setting in settings or ():
        key, given, value = setting.partition("=")
        if not given or key not in ModelConfig.model_fields:
            known = ", ".join(sorted(ModelConfig.model_fields))
            raise UsageError(f"--set takes KEY=VALUE with a field of ModelConfig, not {setting!r}; fields are {known}")
        values[key] = _value(value)
    try:
        return ModelConfig(model=checkpoint_name(model), **values)
    except ValidationError as error:
        # of a union the branch that got furthest into the value; second in its place is the branch's own name
        found = max(
            error.errors(include_input=False, include_url=False),
            key=lambda one: (len(one["loc"]), one["type"] == "value_error"),
        )
        place = [*found["loc"][:1], *found["loc"][2:]]
        raise UsageError(f"{'.'.join(map(str, place))}: {found['msg']}") from None


def _value(text: str) -> Any:
    """The value of a setting: JSON where it is, else text."""
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def read_file(path: Path) -> bytes:
    """The bytes of a file that the command line names. Raises UsageError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def read_json_file(path: Path) -> Any:
    """The JSON of a file, read as strictly as the server reads it. Raises UsageError naming the file and the place."""
    return parse_json(read_file(path), str(path))


def parse_json(data: bytes, name: str) -> Any:
    """The JSON of some bytes; `name` says where they are from. Raises UsageError."""
    from sakuradite.errors import ValidationError
    from sakuradite.http.reading import read_json

    try:
        return read_json(data)
    except ValidationError as error:
        raise UsageError(f"{name}: {error}") from None
