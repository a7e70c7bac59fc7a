"""`sakuradite check`: a Serve config or a RayService manifest, read strictly before it is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sakuradite.cli.exits import REFUSED
from sakuradite.cli.options import Json, read_file
from sakuradite.cli.output import print_json
from sakuradite.errors import MissingExtraError


def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Serve configs, or RayService manifests.")],
    json: Json = False,
) -> None:
    """Check Serve configs before `serve deploy` or `kubectl apply`. Exit code 1 when there is a problem.

    Serve drops a misspelt key without a word; here it is a problem, as are arguments that the builders do not
    understand, import paths that lead nowhere, a model that is declared twice, and keys, tokens and passwords written
    into a config. Needs what the config needs installed; asks no cluster.
    """
    try:
        from sakuradite.cluster.declaration import problems
    except ImportError:
        raise MissingExtraError("Checking Serve configs", "server") from None

    found = {str(path): problems(read_file(path).decode(errors="replace")) for path in files}
    if json:
        print_json({"files": [{"file": name, "problems": listed} for name, listed in found.items()]})
    else:
        for name, listed in found.items():
            for line in [f"{name}: {problem}" for problem in listed] or [f"{name}: ok"]:
                print(line)
    if any(found.values()):
        raise typer.Exit(REFUSED)
