"""`run --jsonl`: a state a line in, a result a line out, in order, with progress, and resumable.

A line out is `{"line": n, "input": digest, "model", "answers", "usage"}`, or `{"line", "input", "error": {code,
message}}` where this state was refused. A failure that says nothing of the state, as a daemon that is gone, ends the
run instead, so that `--resume` goes on there.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from sakuradite.cli.exits import UsageError
from sakuradite.cli.output import json_line
from sakuradite.errors import OF_THE_ROW, APIError, SakuraditeError, ValidationError

if TYPE_CHECKING:
    from sakuradite import AsyncClient, DecisionResult

LINES_AHEAD = 64  # read from standard input before they are asked for
LINE_EVERY = 10.0  # seconds between two lines of plain progress
DIGEST = 8  # bytes; enough to notice another input, a guard against mistakes and not against malice


@dataclass(frozen=True, slots=True)
class Lines:
    """What is asked of every line: the questions of a model, about the line's value or one `field` of it."""

    model: str
    questions: Mapping[str, Any]
    field: str | None = None
    concurrency: int = 16
    timeout: float | None = None

    def digest(self, line: bytes) -> bytes:
        """What tells this line, asked this, from any other."""
        asked = json_line([self.model, self.questions, self.field])
        return hashlib.blake2b(asked + line.strip(), digest_size=DIGEST).digest()

    def state(self, line: bytes) -> Any:
        """The state of a line. Raises ValidationError without a word of its content."""
        from sakuradite.http.problems import invalid
        from sakuradite.http.reading import read_json

        value = read_json(line)
        if self.field is None:
            return value
        if not isinstance(value, dict) or self.field not in value:
            raise invalid(("body", self.field), "the line is no object with this field", "missing")
        return value[self.field]


class Output:
    """Where results go: stdout, or a file that is begun anew or, with `resume`, gone on with."""

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.path = path
        self.done: deque[bytes] = deque()
        """Digests of the lines that the file has already."""
        if path is None:
            if resume:
                raise UsageError("--resume needs the file of an earlier run: add --output FILE")
            self._file: BinaryIO = sys.stdout.buffer
            return
        if path.exists() and path.stat().st_size and not resume:
            raise UsageError(f"{path} exists; add --resume to go on with it, or remove it")
        try:
            self._file = path.open("r+b" if path.exists() else "x+b")
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        try:
            self._recover()
        except UsageError:
            self.close()
            raise

    def _recover(self) -> None:
        """Find what is done, and cut off a last line that was not written to its end."""
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                self.done.append(bytes.fromhex(orjson.loads(line)["input"]))
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{self.path}: line {number} is not of `run --jsonl`") from None
            whole += len(line)
        self._file.seek(whole)
        self._file.truncate()

    def write(self, value: dict[str, Any]) -> None:
        """Write a line, whole, at once."""
        self._file.write(json_line(value))
        self._file.flush()

    def close(self) -> None:
        """Close the file, if it is one of ours."""
        if self.path is not None:
            self._file.close()


async def decide_lines(client: AsyncClient, lines: Lines, output: Output) -> int:
    """Decide on every line of standard input; how many were refused. Raises the failure that ended the run early."""
    waiting: deque[tuple[int, bytes, int, ValidationError | None]] = deque()
    failed = 0

    async def states() -> AsyncIterator[Any]:
        async for number, line in _standard_input():
            digest = lines.digest(line)
            if output.done:
                if output.done.popleft() != digest:
                    raise UsageError(
                        f"{output.path}: what it has for line {number} was made from another input, model or questions"
                    )
                told.skip(len(line))
                continue
            state, problem = None, None
            try:
                state = lines.state(line)
            except ValidationError as error:
                problem = error
            waiting.append((number, digest, len(line), problem))
            yield state  # None, where there is a problem, is no state: it comes back as an error

    with _progress() as told:
        rows = client.decide_many(
            states(), lines.questions, concurrency=lines.concurrency, timeout=lines.timeout, model=lines.model
        )
        async for row in rows:
            number, digest, read, problem = waiting.popleft()
            found = problem or row
            if isinstance(found, SakuraditeError) and getattr(found, "code", None) not in OF_THE_ROW:
                raise found
            output.write({"line": number, "input": digest.hex(), **_fields(found)})
            failed += isinstance(found, SakuraditeError)
            told(read, failed)
    print(f"{told.rows} lines done, {failed} refused", file=sys.stderr)
    return failed


def _fields(found: DecisionResult | SakuraditeError) -> dict[str, Any]:
    if isinstance(found, APIError):
        return {"error": {"code": found.code, "message": found.message}}
    if isinstance(found, SakuraditeError):
        raise found
    return found.model_dump()


async def _standard_input() -> AsyncIterator[tuple[int, bytes]]:
    """The lines of standard input that are not blank, with their numbers; read in a thread that nothing waits for."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(LINES_AHEAD)

    def put(item: tuple[int, bytes] | None) -> bool:
        """Hand a line over, waiting for room; False once nobody takes lines any more."""
        waiting = lines.put(item)
        try:
            asyncio.run_coroutine_threadsafe(waiting, loop).result()
        except RuntimeError:  # the loop is closed
            waiting.close()
            return False
        except CancelledError:
            return False
        return True

    def read() -> None:
        for number, line in enumerate(sys.stdin.buffer, 1):
            if line.strip() and not put((number, line)):
                return
        put(None)

    threading.Thread(target=read, name="standard-input", daemon=True).start()
    while (line := await lines.get()) is not None:
        yield line


class Told:
    """How far a run is, told on stderr: a bar in a terminal, else a plain line now and then."""

    def __init__(self, show: Callable[[int, int, int], None]) -> None:
        self._show = show
        self.rows = self.failed = 0

    def __call__(self, read: int, failed: int) -> None:
        """One more row is done, of so many bytes; so many have failed in all."""
        self.rows += 1
        self.failed = failed
        self._show(self.rows, failed, read)

    def skip(self, read: int) -> None:
        """A row of an earlier run, of so many bytes."""
        self._show(self.rows, self.failed, read)


@contextmanager
def _progress() -> Iterator[Told]:
    """Progress over the bytes of standard input, where it is a file; else only a count."""
    if not sys.stderr.isatty():
        yield Told(_PlainLines())
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    status = os.fstat(sys.stdin.fileno())
    total = status.st_size if stat.S_ISREG(status.st_mode) else None
    columns = [BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("0 done", total=total)
        began = time.monotonic()

        def show(rows: int, failed: int, read: int) -> None:
            rate = rows / max(1e-9, time.monotonic() - began)
            refused = f", {failed} refused" if failed else ""
            progress.update(task, advance=read, description=f"{rows} done{refused}, {rate:.1f}/s")

        yield Told(show)


class _PlainLines:
    def __init__(self) -> None:
        self.told = time.monotonic()

    def __call__(self, rows: int, failed: int, read: int) -> None:
        if time.monotonic() - self.told >= LINE_EVERY:
            self.told = time.monotonic()
            print(f"{rows} done, {failed} refused", file=sys.stderr, flush=True)
