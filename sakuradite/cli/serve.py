"""`sakuradite serve`: the cluster daemon in the foreground."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from sakuradite.cli.place import place_of
from sakuradite.errors import ConfigurationError, MissingExtraError


def serve(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(metavar="HOST", help="Where to listen; 127.0.0.1 by default.")] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", min=0, max=65535, help="Where to listen; 7777 by default.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            envvar="RAY_ADDRESS",
            help="A running Ray cluster to join, as `auto`; else one is started here.",
        ),
    ] = None,
    routers: Annotated[
        str | None,
        typer.Option(metavar="N", help="How many listen here; 1 by default. `node`: one on each machine."),
    ] = None,
    restore: Annotated[
        bool, typer.Option("--restore", help="Load what was loaded when the last daemon ended.")
    ] = False,
    default_model: Annotated[str | None, typer.Option(metavar="MODEL", help="What `default` names.")] = None,
    log_format: Annotated[str | None, typer.Option(metavar="FORMAT", help="Of the log lines: text or json.")] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error; info by default.")
    ] = None,
) -> None:
    """Start the daemon in the foreground; Ctrl-C stops it.

    It is Ray, and a router that serves loaded models over HTTP.

    Keys are taken from SAKURADITE_API_KEY, SAKURADITE_ADMIN_KEY or config.toml, never from the command line.
    """
    from sakuradite.config import server_settings

    if sys.platform == "win32":
        raise ConfigurationError("the daemon needs Linux or macOS; on Windows run it in WSL2 or in a container")
    if not all(find_spec(module) for module in ("ray", "uvicorn", "zstandard")):
        raise MissingExtraError("serve", "server")
    config = server_settings(
        place_of(context).home,
        host=host,
        port=port,
        address=address,
        routers=_routers(routers),
        default_model=default_model,
        log_format=log_format,
        log_level=log_level,
    )
    from sakuradite.cluster.daemon import serve as run_daemon

    run_daemon(config, restore=restore)


def _routers(given: str | None) -> int | str | None:
    """A number as one; whatever else is judged with the other settings."""
    return int(given) if given is not None and given.isdecimal() else given
