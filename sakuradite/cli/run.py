"""`sakuradite run`: decide on a state, or on a state a line; on the daemon, or embedded with --local."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sakuradite.cli.exits import REFUSED, UsageError
from sakuradite.cli.models import wait_for
from sakuradite.cli.options import (
    Backend,
    Device,
    Dtype,
    Offline,
    Questions,
    Revision,
    Setting,
    model_config,
    named_model,
    parse_json,
    read_file,
    read_json_file,
)
from sakuradite.cli.output import console, is_terminal, print_json
from sakuradite.cli.place import Place, place_of
from sakuradite.cli.progress import spinner

if TYPE_CHECKING:
    from sakuradite import SyncClient
    from sakuradite.config import ModelConfig

JSONL_RETRIES = 8  # of one row after 429 or 503: a full queue or a replica that restarts should not end a long run


def run(
    context: typer.Context,
    questions: Questions,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Loaded if needed. Else SAKURADITE_MODEL, config.toml.")
    ] = None,
    state: Annotated[str | None, typer.Option(metavar="TEXT", help="What to decide on; else standard input.")] = None,
    state_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to decide on: UTF-8 text, or JSON in a .json file.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A JPEG or PNG; up to eight. Repeatable.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Embedded: load the model here, without a daemon.")] = False,
    backend: Backend = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    offline: Offline = False,
    set_: Setting = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="For one decision; else the model's own.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print each answer as a line of JSON when it is there.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Print a table with bars instead of JSON.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON (the default; said for symmetry).")] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One state a line on standard input, as JSON; one result a line out.")
    ] = False,
    field: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --jsonl: the field of each line's object that is the state."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="With --jsonl: where results go; else stdout.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --output: keep what FILE has and go on after it.")
    ] = False,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="With --jsonl: requests in flight.")] = 16,
) -> None:
    """Print a decision about a state as JSON. The model is loaded if needed."""
    place = place_of(context)
    asked = _questions(questions)
    _refuse_together(jsonl=jsonl, state=state, state_file=state_file, image=image, stream=stream, table=table)
    if not jsonl and (field or output or resume):
        raise UsageError("--field, --output and --resume belong to --jsonl")
    given: Any = None if jsonl else _state(state, state_file)
    name = named_model(model, place.home, "sakuradite run MODEL …")
    config = model_config(name, set_, backend=backend, device=device, dtype=dtype, revision=revision, offline=offline)
    _check("" if jsonl else given, asked, image or (), timeout, questions)
    if jsonl:
        import asyncio

        from sakuradite.cli.jsonl import Lines, Output, decide_lines

        lines = Lines(name, asked, field, concurrency, timeout)
        with closing(Output(output, resume)) as results, _client(place, config, local, JSONL_RETRIES) as client:
            failed = asyncio.run(decide_lines(client.coroutines(), lines, results))
        if failed:
            raise typer.Exit(REFUSED)
        return
    with _client(place, config, local, 0) as client:
        if stream:
            with client.decide(given, asked, images=image or (), stream=True, timeout=timeout, model=name) as events:
                for event in events:
                    print_json({"type": event.type, **event.model_dump(mode="json")}, indent=False)
        else:
            result = client.decide(given, asked, images=image or (), timeout=timeout, model=name)
            if table:
                from sakuradite.cli.answers import print_result

                print_result(result, console())
            else:
                print_json(result, indent=is_terminal())


@contextmanager
def _client(place: Place, config: ModelConfig, local: bool, retries: int) -> Iterator[SyncClient]:
    """An open client whose model is loaded."""
    if local:
        from sakuradite import Sakuradite

        if place.base_url:
            raise UsageError("--local needs no daemon; leave out --base-url")
        with spinner(f"loading {config.model}"):
            client = Sakuradite(config, base_url="", home=place.home, retries=retries).open()
    else:
        client = place.client(retries)
    with client:
        if not local:
            ensure_loaded(client, config)
        yield client


def ensure_loaded(client: SyncClient, config: ModelConfig) -> None:
    """Load a model on the daemon and wait for it. One that is resident is used as it is, unless options were given."""
    plain = config.model_dump(exclude_defaults=True).keys() == {"model"}
    if plain and config.model in client.models.ready():
        return
    wait_for(client, client.models.load(config))


def _questions(path: Path) -> dict[str, Any]:
    found = read_json_file(path)
    if not isinstance(found, dict):
        raise UsageError(f"{path}: must hold a JSON object of questions by id")
    return found


def _check(state: Any, asked: dict[str, Any], images: Sequence[Path], timeout: float | None, file: Path) -> None:
    """Refuse what no model can answer before one is loaded for it. Raises UsageError."""
    from sakuradite.client.request import decision
    from sakuradite.errors import ValidationError

    try:
        decision("", state, asked, images, timeout)
    except ValidationError as error:
        where = f"{file}: " if (error.param or "").startswith("questions") else ""
        raise UsageError(f"{where}{error}") from None


def _state(text: str | None, file: Path | None) -> Any:
    """The state of a command line: --state, --state-file, else standard input."""
    if text is not None and file is not None:
        raise UsageError("give --state or --state-file, not both")
    if text is not None:
        return text
    if file is not None:
        data, name = read_file(file), str(file)
        if file.suffix.lower() == ".json":
            return parse_json(data, name)
    elif sys.stdin.isatty():
        raise UsageError("no state: give --state TEXT or --state-file FILE, or pipe it in")
    else:
        data, name = sys.stdin.buffer.read(), "standard input"
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text (byte {error.start})") from None


def _refuse_together(jsonl: bool, **others: object) -> None:
    """With --jsonl the states come from standard input, and results go out as lines."""
    for name, value in others.items():
        if jsonl and value:
            raise UsageError(f"--jsonl reads the states from standard input; leave out --{name.replace('_', '-')}")
