"""How a command ends: its exit code, and its one line on stderr when something went wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from sakuradite.errors import (
    ClosedError,
    ConfigurationError,
    MissingExtraError,
    SakuraditeError,
    TransportError,
)

DONE = 0
REFUSED = 1
"""The daemon or the model said no: an error of the API, a failed operation, a finding of `doctor`."""
USAGE = 2
"""The command line, a file it names, the settings, or the installation is wrong; nothing was sent."""
NO_ANSWER = 3
"""The daemon could not be reached, or no complete answer came."""
ROWS_REFUSED = 4
"""`batch` is done and its output is whole, but some rows have an error in place of answers."""
INTERRUPTED = 130
"""Ctrl-C."""


class UsageError(SakuraditeError):
    """The command line, or a file that it names, cannot be what was meant."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command of some arguments (sys.argv by default) and give its exit code."""
    from sakuradite.cli.app import app

    try:
        code = app(list(arguments) if arguments is not None else None, prog_name="sakuradite", standalone_mode=False)
    except SakuraditeError as error:
        return fail(str(error), code_of(error))
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "sakuradite"
        return fail(f"{error.format_message()} (see {where} --help)", USAGE)
    except typer.Exit as end:
        code = end.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        return fail("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else DONE


def code_of(error: SakuraditeError) -> int:
    """The exit code of an error."""
    if isinstance(error, TransportError | ClosedError):
        return NO_ANSWER
    if isinstance(error, UsageError | MissingExtraError | ConfigurationError):
        return USAGE
    return REFUSED


def fail(message: str, code: int) -> int:
    """Say what went wrong, in one line; gives the code back."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    return code
