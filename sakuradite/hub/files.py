"""Files of the store: written for their owner alone, without buffers, and told apart by their digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHUNK = 1 << 20  # bytes read at once to hash a file


@contextmanager
def open_private(path: Path) -> Iterator[_Appender]:
    """A file to append to, made for its owner alone; a symlink is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    appender = _Appender(os.open(path, flags, 0o600))
    try:
        yield appender
    finally:
        os.close(appender.fileno())


class _Appender:
    """Unbuffered: what was counted as arrived is with the system, and an interrupted process loses nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)


def digest_of(path: Path, like: str) -> str:
    """The digest of a file, of the same kind as `like`."""
    with path.open("rb") as file:
        if like.startswith("sha256:"):
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        blob = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        while chunk := file.read(CHUNK):
            blob.update(chunk)
        return "git:" + blob.hexdigest()
