"""The reference part of docs/cli.md, made from the commands. Write it with: python -m tests.cli.reference"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from sakuradite.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
MARK = "<!-- From here on made by: python -m tests.cli.reference -->\n"


def reference() -> str:
    """Every command with its arguments and options, as Markdown."""
    group: Any = get_command(app)
    parts = ["## Options before the command\n", *_options(group)]
    for name, command in group.commands.items():
        parts += [f"## sakuradite {name}\n", f"{_paragraphs(command.help)}\n", f"    {_usage(name, command)}\n"]
        parts += _options(command)
    return "\n".join(parts)


def page() -> str:
    """The whole page as it should be: its own words, then the reference."""
    words, _, _ = PAGE.read_text().partition(MARK)
    return f"{words}{MARK}\n{reference()}"


def _usage(name: str, command: Any) -> str:
    arguments = " ".join(_argument(p) for p in command.params if p.param_type_name == "argument")
    return f"sakuradite {name} [OPTIONS] {arguments}".rstrip()


def _argument(parameter: Any) -> str:
    metavar = str(parameter.metavar or parameter.name.upper())
    return metavar if parameter.required or metavar.startswith("[") else f"[{metavar}]"


def _options(command: Any) -> list[str]:
    rows = [row for parameter in command.params if (row := _row(parameter))]
    return ["| | |", "|---|---|", *rows, ""] if rows else []


def _row(parameter: Any) -> str | None:
    if not parameter.help or parameter.name in ("install_completion", "show_completion"):
        return None
    if parameter.param_type_name == "argument":
        names = f"`{_argument(parameter)}`"
    else:
        metavar = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        names = ", ".join(f"`{name}{metavar}`" for name in parameter.opts)
    needed = " Required." if parameter.required and parameter.param_type_name == "option" else ""
    return f"| {names} | {parameter.help}{needed} |"


def _paragraphs(text: str) -> str:
    return re.sub(r"[ \t]+\n|\n[ \t]+", "\n", text).strip()


if __name__ == "__main__":
    PAGE.write_text(page())
