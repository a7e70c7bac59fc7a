"""What commands print: JSON, tables, values; fitted and coloured in a terminal, plain where it is piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console


def is_terminal() -> bool:
    """Whether a person reads the standard output."""
    return sys.stdout.isatty()


def print_json(value: BaseModel | Sequence[BaseModel] | dict[str, Any], indent: bool = True) -> None:
    """The value as JSON on stdout; `indent` for people, one line for JSON lines."""
    sys.stdout.flush()
    sys.stdout.buffer.write(json_line(value, indent))
    sys.stdout.buffer.flush()


def json_line(value: Any, indent: bool = False) -> bytes:
    """The value as JSON with a newline. By pydantic: a score's legend may hold integers too long for orjson."""
    from pydantic_core import to_json

    return to_json(value, indent=2 if indent else None) + b"\n"


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """A table, of as many columns as the terminal has room for; piped, lines of tab-separated values.

    Where room is short, paths in the first column are cut at their left before a column is left out, and a line says
    which are missing. `empty` is what to say in a terminal where there are no rows.
    """
    rows = list(rows)
    if not is_terminal():
        for row in (headers, *rows) if rows else ():
            print("\t".join(row))
        return
    if not rows:
        print(empty)
        return
    from rich.table import Table

    terminal = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = _fitting([headers, *rows], terminal.width)
    if columns < len(headers):
        rows = [(_short(row[0]), *row[1:]) for row in rows]
        columns = _fitting([headers, *rows], terminal.width)
    for i, header in enumerate(headers[:columns]):
        table.add_column(header, overflow="fold", no_wrap=i > 0)
    for row in rows:
        table.add_row(*row[:columns])
    terminal.print(table)
    if columns < len(headers):
        terminal.print(f"no room for {', '.join(headers[columns:])}; --json has everything", style="dim")


def _short(name: str) -> str:
    """A path by its last part, as people tell checkpoints apart; anything else as it is."""
    return f"…/{PurePath(name).name}" if PurePath(name).is_absolute() else name


def _fitting(rows: Sequence[Sequence[str]], width: int) -> int:
    """How many columns, from the left, a terminal has room for; at least two, of which the first may then wrap."""
    widths = [max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0]))]
    columns = len(widths)
    while columns > 2 and sum(widths[:columns]) > width:
        columns -= 1
    return columns


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Named values, one a line; values are aligned in a terminal, tab-separated where stdout is piped."""
    fields = list(fields)
    width = max((len(name) for name, _ in fields), default=0) if is_terminal() else 0
    for name, value in fields:
        print(f"{name:<{width}}  {value}" if width else f"{name}\t{value}")


def console() -> Console:
    """The terminal, for rich."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def size(count: int | None) -> str:
    """Bytes as people write them: 273 MB, decimal."""
    if count is None:
        return "-"
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def ago(seconds: float | None) -> str:
    """How long ago a time was: 12 s, 5 min, 3 h, 2 d."""
    if seconds is None:
        return "-"
    past = max(0.0, time.time() - seconds)
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if past < limit:
            return f"{past / unit:.0f} {name} ago"
    return f"{past / 86_400:.0f} d ago"
