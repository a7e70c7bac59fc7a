"""The `sakuradite` command. Thin: parse, call the SDK, print. `main` is the entry point."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 refused, 2 wrong usage or settings, 3 no answer, 4 rows with errors,
    130 interrupted.

    Errors are one line on stderr, for a user's mistake never a traceback.
    """
    try:
        from sakuradite.cli.exits import run

        code = run(arguments)
    except KeyboardInterrupt:  # before `run` could say it: while modules were imported
        print("error: interrupted", file=sys.stderr)
        code = 130
    raise SystemExit(code)
