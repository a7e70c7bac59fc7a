"""How long work is told on stderr: a bar with bytes, rate and remaining time in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sakuradite.cli.output import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

    from sakuradite.operations import Operation

LINE_EVERY = 10.0  # seconds between two plain lines of one phase

type Tell = Callable[[Operation], None]


@contextmanager
def operation_progress(model: str) -> Iterator[Tell]:
    """What to call with an operation each time it is polled."""
    if not sys.stderr.isatty():
        yield _Lines(model)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Counted(ProgressColumn):
        """A column that stays empty in a phase with nothing to count."""

        def __init__(self, column: ProgressColumn) -> None:
            self.column = column
            super().__init__()

        def render(self, task: Task) -> RenderableType:
            return self.column.render(task) if task.completed or task.total else Text("")

    name = TextColumn("{task.fields[model]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns: list[ProgressColumn] = [SpinnerColumn(), name, TextColumn("{task.description}"), BarColumn(bar_width=20)]
    columns += [Counted(column) for column in (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())]
    columns.append(TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as progress:
        yield _Bar(progress, model)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Work whose extent is unknown: a spinner on stderr in a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


class _Bar:
    def __init__(self, progress: Progress, model: str) -> None:
        self.progress, self.phase = progress, ""
        self.task = progress.add_task("pending", total=None, model=model)

    def __call__(self, operation: Operation) -> None:
        now = operation.progress
        if now.phase != self.phase:  # rate and remaining time belong to one phase
            self.phase = now.phase
            self.progress.reset(self.task, total=now.bytes_total, description=now.phase)
        self.progress.update(self.task, completed=now.bytes_done or 0, total=now.bytes_total)


class _Lines:
    def __init__(self, model: str) -> None:
        self.model, self.phase, self.told = model, "", 0.0

    def __call__(self, operation: Operation) -> None:
        now, clock = operation.progress, time.monotonic()
        if now.phase == self.phase and (now.bytes_done is None or clock - self.told < LINE_EVERY):
            return
        self.phase, self.told = now.phase, clock
        of = "" if now.bytes_total is None else f" of {size(now.bytes_total)}"
        done = "" if now.bytes_done is None else f" {size(now.bytes_done)}{of}"
        why = "" if now.reason is None else f": {now.reason}"
        print(f"{self.model}: {now.phase}{done}{why}", file=sys.stderr, flush=True)
