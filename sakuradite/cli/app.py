"""The commands and the options before them. Each command lives in the module of its subject."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sakuradite.cli import batch, check, demo, doctor, models, run, serve
from sakuradite.cli.place import Place

app = typer.Typer(
    help="Typed decisions with probabilities from open-weight language models.",
    epilog="Exit codes: 0 done, 1 refused by the daemon or the model, 2 wrong usage, settings or installation, "
    "3 no answer from the daemon, 4 a bulk job is done and some of its rows have errors, 130 interrupted.",
    rich_markup_mode=None,  # plain help: rich costs more than everything else here together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from sakuradite import __version__

        print(f"sakuradite {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The daemon. Else SAKURADITE_BASE_URL, config.toml, http://127.0.0.1:7777."),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Settings, keys, downloads. Else SAKURADITE_HOME, ~/.sakuradite."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Typed decisions with probabilities from open-weight language models.

    Without a command: an interactive shell in a terminal, else this help.
    """
    context.obj = Place(base_url, home)
    if context.invoked_subcommand is not None:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(context.get_help())
        return
    from sakuradite.cli.shell import shell

    shell(context.obj)


app.command()(demo.demo)
app.command()(serve.serve)
app.command()(run.run)
app.command()(batch.batch)
app.command()(models.load)
app.command()(models.ps)
app.command()(models.unload)
app.command()(models.pull)
app.command("list")(models.list_)
app.command()(models.inspect)
app.command()(models.rm)
app.command()(models.alias)
app.command()(check.check)
app.command()(doctor.doctor)
