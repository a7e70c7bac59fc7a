"""`sakuradite batch`: decide on every row of a file, over many replicas, with progress on stderr; resumable."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sakuradite.cli.exits import INTERRUPTED, ROWS_REFUSED, UsageError
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
    read_json_file,
)
from sakuradite.cli.output import print_json
from sakuradite.cli.place import place_of
from sakuradite.errors import APIError, ConfigurationError, ValidationError

if TYPE_CHECKING:
    from sakuradite.batch import Progress, Report, Summary

LINE_EVERY = 10.0  # seconds between two lines of plain progress


def batch(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .jsonl (also .gz, .zst), .csv or .parquet file.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The output: .jsonl, .csv or .parquet.")],
    questions: Questions,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Else SAKURADITE_MODEL, config.toml.")
    ] = None,
    state_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What to decide on; else the column `state`, else the whole row."),
    ] = None,
    whole_row: Annotated[bool, typer.Option("--whole-row", help="Decide on each whole row, as a JSON object.")] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A column of the input for the output; by default all. Repeatable."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(metavar="N", min=1, help="Copies of the model; 1 by default.")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A running Ray cluster, as `auto`; else Ray is started here.")
    ] = None,
    num_gpus: Annotated[float | None, typer.Option(metavar="N", min=0, help="GPUs of a replica.")] = None,
    num_cpus: Annotated[float | None, typer.Option(metavar="N", min=0, help="CPUs of a replica.")] = None,
    backend: Backend = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    offline: Offline = False,
    set_: Setting = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw an unfinished job away; replace an output that exists.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON, and nothing else on stdout.")] = False,
) -> None:
    """Decide on every row of a file. What is done is kept; the same command goes on after an interruption."""
    from sakuradite.batch import run

    home = place_of(context).home
    asked = read_json_file(questions)
    name = named_model(model, home, "--model MODEL")
    resources = {"replicas": replicas, "num_gpus": num_gpus, "num_cpus": num_cpus}
    loading: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype, "revision": revision}
    config = model_config(name, set_, offline=offline, **loading, **resources)
    try:
        with _quiet(), _progress(address) as report:
            summary = run(
                source,
                target,
                asked,
                config,
                address=address,
                state_column=state_column,
                whole_row=whole_row,
                keep=keep,
                restart=restart,
                home=home,
                report=report,
            )
    except KeyboardInterrupt:
        _tell_how_to_go_on(target)
        raise typer.Exit(INTERRUPTED) from None
    except ValidationError as error:
        raise UsageError(f"{questions}: {error}") from None
    except ConfigurationError:
        raise
    except APIError:
        _tell_how_to_go_on(target)
        raise
    _tell(summary, json)
    if summary.errors:
        raise typer.Exit(ROWS_REFUSED)


def _tell(summary: Summary, as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        print_json(asdict(summary))
        return
    resumed = f", {summary.resumed} of them by an earlier run" if summary.resumed else ""
    print(
        f"{summary.output}: {summary.rows} rows{resumed}, {summary.errors} with errors,"
        f" {summary.input_tokens} tokens read in {summary.seconds:.1f} s",
        file=sys.stderr,
    )


def _tell_how_to_go_on(target: Path) -> None:
    """Say the command that goes on, where there is something to go on with."""
    from sakuradite.batch.folder import beside

    folder = beside(target)
    if (folder / "manifest.json").exists():
        command = shlex.join(["sakuradite", *(word for word in sys.argv[1:] if word != "--restart")])
        print(f"what is done is kept in {folder}; go on with: {command}", file=sys.stderr, flush=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray's C++ off the terminal: it writes a warning about its own actors to descriptor 2, whatever its level."""
    before = sys.__stderr__
    if before is None or sys.stderr is not before:  # somebody captures it already
        yield
        return
    before.flush()
    terminal = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    sys.stderr = os.fdopen(terminal, "w", buffering=1, encoding=before.encoding, errors=before.errors)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        sys.stderr.close()
        sys.stderr = before


@contextmanager
def _progress(address: str | None = None) -> Iterator[Report]:
    """Progress on stderr: a bar in a terminal, else a line for each phase and now and then."""
    pace = _Pace(address)
    if not sys.stderr.isatty():
        yield _Lines(pace)
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = [SpinnerColumn(), BarColumn(bar_width=20), TaskProgressColumn(), TextColumn("{task.description}")]
    with Bar(*columns, TimeElapsedColumn(), console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=pace.words(progress))

        yield show


class _Pace:
    """How fast rows of this run come, from the first that came: what was started for them says nothing of the rest."""

    def __init__(self, address: str | None = None) -> None:
        self.first: tuple[float, int] | None = None
        self.starting = "starting Ray" if address is None else f"joining the Ray cluster at {address}"

    def words(self, progress: Progress) -> str:
        """The phase, or rows, rate, errors and the time that is left."""
        if progress.phase not in ("deciding", "repeating"):
            return f"{self.starting} and loading the model" if progress.phase == "starting" else progress.phase
        now, total = time.monotonic(), progress.total or 0
        began, rows = self.first = self.first or (now, progress.done)
        parts = [f"{progress.done} of {total} rows"]
        if progress.errors:
            parts.append(f"{progress.errors} with errors")
        if progress.done > rows:
            rate = (progress.done - rows) / max(1e-3, now - began)
            parts += [f"{rate:.1f}/s", f"{_duration((total - progress.done) / rate)} left"]
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Lines:
    def __init__(self, pace: _Pace) -> None:
        self.phase, self.told, self.pace = "", 0.0, pace

    def __call__(self, progress: Progress) -> None:
        words, now = self.pace.words(progress), time.monotonic()
        if progress.phase == self.phase and now - self.told < LINE_EVERY:
            return
        self.phase, self.told = progress.phase, now
        print(words, file=sys.stderr, flush=True)
