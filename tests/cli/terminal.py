"""A real terminal for a command: a pseudo-terminal of a given size, what is typed into it, what it shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
FORWARD = re.compile(r"\x1b\[(\d*)C")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>]|\r")


class Terminal:
    """`python -m sakuradite …` in a terminal; stdin may be redirected from a file, as a shell would do."""

    def __init__(self, *arguments: object, columns: int = 100, stdin: Path | None = None, **environment: str) -> None:
        self.shown = ""
        self._raw = b""
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        source = side if stdin is None else os.open(stdin, os.O_RDONLY)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sakuradite", *map(str, arguments)],
            stdin=source,
            stdout=side,
            stderr=side,
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns)} | environment,
            preexec_fn=_controlling(side),
        )
        os.close(side)
        if source != side:
            os.close(source)

    def press(self, text: str) -> None:
        """Press keys."""
        os.write(self._main, text.encode())

    def expect(self, text: str, seconds: float = 60) -> str:
        """Wait until a text is shown, after what was expected before; all that came until then."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} was not shown in {seconds} s:\n{self.shown}"
            if not self._read():
                raise AssertionError(f"{text!r} was not shown before the end:\n{self.shown}")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def end(self, seconds: float = 60) -> int:
        """Wait for the end; the exit code. `shown` is the rest of what came."""
        end = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < end, f"did not end in {seconds} s:\n{self.shown}"
        return self.process.wait(10)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._main], [], [], 0.2)
        if not ready:
            return True
        try:
            data = os.read(self._main, 65536)
        except OSError:  # the other side is closed
            return False
        if b"\x1b[6n" in data:
            os.write(self._main, b"\x1b[1;1R")  # where the cursor is, as a terminal answers
        self._raw += data
        text = self._raw.decode(errors="ignore")
        self._raw = b""
        text = FORWARD.sub(lambda move: " " * int(move[1] or 1), text)
        self.shown += CONTROL.sub("", text)
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)
        os.close(self._main)


def _controlling(side: int) -> Callable[[], None]:
    """What makes the new process the leader of the terminal, so that Ctrl-C reaches it."""

    def make() -> None:
        os.setsid()
        fcntl.ioctl(side, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return make
