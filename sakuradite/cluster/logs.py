"""The log of one process of the cluster: lines of text, or one JSON object a line, in a file of its own or on stderr.

What may be in a line is decided where it is written: ids, names of models, codes, counts and durations, never a word
of a request or a key. Lines that every request has go to `Lines.tell`: the ways of `logging` cost several times what is
left here, and a write for each as much again. All others are ordinary records; their fields travel as
`extra={"fields": {...}}`.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from functools import lru_cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

from sakuradite.config import LogSettings

FILE_BYTES = 32 << 20
OLD_FILES = 2
"""A process keeps its newest lines and this many full files of older ones."""
MAX_FILES = 60
"""Of all processes together, those that ended included; the oldest go first."""
OURS = re.compile(r"(router|catalog|model)-[a-z0-9]+\.log(\.\d+)?")
"""A process and Serve's id of its replica. The folder may be one that holds other programs' logs too."""

TOGETHER_SECONDS = 0.1
"""So long lines of requests wait for each other before they are written."""
MAX_WAITING = 10_000
"""Lines; some 3 MB. Beyond it requests wait for the disk."""

QUIET_ROUTES = ("/healthz", "/readyz", "/metrics")
"""Asked every few seconds by probes: their lines are for `debug`."""


class JsonLines(logging.Formatter):
    """One object per line: `time`, `level`, `logger`, `process`, `replica`, `message`, then the line's own fields."""

    def __init__(self, process: str, replica: str) -> None:
        super().__init__()
        self._origin = {"process": process, "replica": replica}

    def line(self, moment: float, level: str, logger: str, message: str, fields: dict[str, Any]) -> str:
        """One line, without its end. `moment` in seconds since the epoch."""
        line = {"time": _time(moment), "level": level, "logger": logger, **self._origin, "message": message, **fields}
        return orjson.dumps(line, default=str).decode()

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        if record.exc_info:
            fields = {**fields, "exception": self.formatException(record.exc_info)}
        return self.line(record.created, record.levelname.lower(), record.name, record.getMessage(), fields)


class TextLines(logging.Formatter):
    """`time level process message field=value …`, and a traceback below where there is one."""

    def __init__(self, process: str, replica: str) -> None:
        super().__init__()
        self._process = process

    def line(self, moment: float, level: str, logger: str, message: str, fields: dict[str, Any]) -> str:
        """One line, without its end. `moment` in seconds since the epoch."""
        own = "".join([f" {name}={value}" for name, value in fields.items() if value not in ("", None)])
        return f"{_time(moment)} {level} {self._process} {message}{own}"

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line = self.line(record.created, record.levelname.lower(), record.name, record.getMessage(), fields)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _time(moment: float) -> str:
    """UTC to the millisecond, as ISO 8601."""
    second = int(moment)
    return f"{_second(second)}.{int((moment - second) * 1000):03d}Z"


def request_id_of(key: str) -> str:
    """The id that the caller knows, of a request record's id: what makes it unique stands behind a slash."""
    return key.partition("/")[0]


class Lines(logging.Handler):
    """Writes the lines of one process in the order in which they came.

    Those of requests wait a moment and are written together by a thread; any other takes along what waits before it and
    is in the file when the call returns.
    """

    def __init__(self, formatter: JsonLines | TextLines, out: logging.StreamHandler[Any]) -> None:
        """`out` is only written to: whole lines, already formatted."""
        super().__init__()
        self.out = out
        self._line = formatter.line
        self.setFormatter(formatter)
        self._waiting: deque[tuple[float, str, str, str, dict[str, Any]] | str] = deque()
        self._writing = threading.RLock()
        self._wake = threading.Event()
        self._closed = False
        threading.Thread(target=self._write_together, name="log lines", daemon=True).start()

    def tell(self, level: str, logger: str, message: str, fields: dict[str, Any]) -> None:
        """A line of a request. Whether its level is wanted is for the caller to ask.

        It is formatted when it is written: many in a row take 2 us each (text 4), one beside a request's other work 10.
        """
        self._waiting.append((time.time(), level, logger, message, fields))
        if not self._wake.is_set():
            self._wake.set()
        if len(self._waiting) > MAX_WAITING:
            self.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """A record of `logging`."""
        try:
            self._waiting.append(self.format(record))
        except Exception:
            self.handleError(record)
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._writing:
            lines = []
            while self._waiting:
                line = self._waiting.popleft()
                lines.append(line if isinstance(line, str) else self._line(*line))
            if lines:
                self.out.handle(logging.makeLogRecord({"msg": "\n".join(lines)}))

    def close(self) -> None:
        """Write what waits, and no more after it. `logging` calls it when the interpreter ends."""
        self._closed = True
        self._wake.set()
        self.flush()
        self.out.close()
        super().close()

    def _write_together(self) -> None:
        while not self._closed:
            self._wake.wait()
            time.sleep(TOGETHER_SECONDS)
            self._wake.clear()
            self.flush()


def start(settings: LogSettings, process: str, replica: str) -> Lines:
    """Let this process's log lines be written as the settings say. Called once, by a process that is ours alone.

    A folder that cannot be written to is told on stderr, and the lines go there too: a server does not end for its log.
    """
    formatter = (JsonLines if settings.format == "json" else TextLines)(process, replica)
    handler = Lines(formatter, _out(settings.directory, f"{process}-{replica}"))
    logger = logging.getLogger("sakuradite")
    logger.handlers = [handler]
    logger.setLevel(settings.level.upper())
    logger.propagate = False
    return handler


class _Rotating(RotatingFileHandler):
    """Looks at the size after lines, not before: the standard one formats them twice for that. Every file is its
    owner's alone.
    """

    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=_private)

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        return self.stream is not None and self.stream.tell() >= self.maxBytes


def _out(directory: Path | None, name: str) -> logging.StreamHandler[Any]:
    if directory is None:
        return logging.StreamHandler()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_old(directory)
        return _Rotating(directory / f"{name}.log", maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")
    except OSError as error:
        print(f"no log in {directory}: {error.strerror}; it goes to stderr", file=sys.stderr)
        return logging.StreamHandler()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _forget_old(directory: Path) -> None:
    """Delete the oldest of our logs beyond `MAX_FILES`."""
    times: list[tuple[float, Path]] = []
    for path in directory.iterdir():
        if not OURS.fullmatch(path.name):
            continue
        try:
            times.append((path.stat().st_mtime, path))
        except FileNotFoundError:  # another process tidies up as well
            continue
    for _, path in sorted(times, reverse=True)[MAX_FILES:]:
        path.unlink(missing_ok=True)
