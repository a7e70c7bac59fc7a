"""The log of one process of the cluster: lines of text, or one JSON object a line, in a file of its own or on stderr.

What may be in a line is decided where it is written: ids, names of models, codes, counts and durations, never a word
of a request or a key. Fields travel as `extra={"fields": {...}}`, a request's id as `extra={"request_id": ...}`.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
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

QUIET_ROUTES = ("/healthz", "/readyz", "/metrics")
"""Asked every few seconds by probes: their lines are for `debug`."""


class JsonLines(logging.Formatter):
    """One object per record: `time`, `level`, `logger`, `process`, `replica`, `message`, then the record's own."""

    def __init__(self, process: str, replica: str) -> None:
        super().__init__()
        self._origin = {"process": process, "replica": replica}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._origin,
            "message": record.getMessage(),
            **_own(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class TextLines(logging.Formatter):
    """`time level process message field=value …`, and a traceback below where there is one."""

    def __init__(self, process: str, replica: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _own(record).items() if value not in ("", None))
        line = f"{_time(record)} {record.levelname.lower()} {self._process} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    """UTC to the millisecond, as ISO 8601."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _own(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the record brought."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    request_id = getattr(record, "request_id", None)
    return fields if request_id is None else {"request_id": request_id, **fields}


def request_id_of(key: str) -> str:
    """The id that the caller knows, of a request record's id: what makes it unique stands behind a slash."""
    return key.partition("/")[0]


def start(settings: LogSettings, process: str, replica: str) -> logging.Handler:
    """Let this process's log lines be written as the settings say. Called once, by a process that is ours alone.

    A folder that cannot be written to is told on stderr, and the lines go there too: a server does not end for its log.
    """
    formatter = (JsonLines if settings.format == "json" else TextLines)(process, replica)
    handler = _handler(settings.directory, f"{process}-{replica}")
    handler.setFormatter(formatter)
    logger = logging.getLogger("sakuradite")
    logger.handlers = [handler]
    logger.setLevel(settings.level.upper())
    logger.propagate = False
    return handler


class _Rotating(RotatingFileHandler):
    """Looks at the size after a line, not before: the standard one formats every line twice for that. Every file is
    its owner's alone.
    """

    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=_private)

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        return self.stream is not None and self.stream.tell() >= self.maxBytes


def _handler(directory: Path | None, name: str) -> logging.Handler:
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
