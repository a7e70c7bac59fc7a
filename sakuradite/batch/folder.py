"""The folder of a job beside its output: a manifest, and a file for each part that is done.

Every file comes into being by a rename of a complete one, so after a kill -9 at any point a part is there or it is not;
after a power failure too, since a part's name says how long it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic_core import to_json

from sakuradite.batch.source import unreadable
from sakuradite.errors import ConfigurationError, InsufficientStorageError, InvalidLifecycleError

MANIFEST = "manifest.json"
LOCK = "lock"
OUTPUT = "output.tmp"
OURS = re.compile(r"(manifest\.json|lock|part(-\d+){5})(\.tmp)?|output\.tmp")
COMPLETE = "complete"
"""The field of a manifest whose output is written: what the job came to. Only the folder is left to remove."""


class Folder:
    """`OUT.batch`. Raises InsufficientStorageError where it cannot be written."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = beside(target)
        self.output = self.path / OUTPUT
        """Where the output is written before it takes its place: on the same disk."""
        self._lock = FileLock(self.path / LOCK, timeout=0)

    def open(self, restart: bool) -> dict[str, Any] | None:
        """Take the folder for this process; the manifest of an earlier run, None where there is nothing to go on with.

        `restart` throws an earlier run away, and lets an output that exists be replaced in the end. Raises
        InvalidLifecycleError while another process works here, ConfigurationError where the output exists already or
        the folder holds what is not ours: everything in it is removed in the end.
        """
        begun = (self.path / MANIFEST).exists()
        if self.target.exists() and not begun and not restart:
            raise ConfigurationError(f"{self.target} exists; add --restart to replace it, or name another output")
        try:
            self.path.mkdir(exist_ok=True)
            if strange := [name for name in os.listdir(self.path) if not OURS.fullmatch(name)]:
                raise ConfigurationError(
                    f"{self.path}: {strange[0]} is of no bulk job; move it, or name another output"
                )
            self._lock.acquire()
        except Timeout:
            raise InvalidLifecycleError(f"another process is working on {self.target}") from None
        except OSError as error:
            raise storage(self.path, error) from None
        if restart:
            self._clear()
        try:
            return read_manifest(self.path / MANIFEST)
        except ConfigurationError:
            self._lock.release()
            raise

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Say what this job is made from. Nothing of it is done yet."""
        self._clear()
        self._write(MANIFEST, to_json(manifest, indent=2))

    def done(self) -> dict[int, tuple[int, int, int]]:
        """The parts that are there in full, each with its rows, errors and tokens; what is not so is removed."""
        found = {}
        for name in self._parts():
            number, *counts, size = (int(field) for field in name.split("-")[1:])
            if (self.path / name).stat().st_size == size:
                found[number] = (counts[0], counts[1], counts[2])
            else:  # the power failed: a file may then be shorter than what was written to it
                (self.path / name).unlink()
        return found

    def add(self, number: int, fields: Sequence[bytes], errors: int, tokens: int) -> None:
        """Keep a part: a line for each of its rows. Its name says what there is to sum up, and how long it is.

        It is not forced to the disk, which takes tens of milliseconds: `done` notices what a power failure cut off.
        """
        data = b"".join(line + b"\n" for line in fields)
        self._write(f"part-{number:07d}-{len(fields)}-{errors}-{tokens}-{len(data)}", data, force=False)

    def lines(self) -> Iterator[bytes]:
        """The fields of all rows, in order, from the parts."""
        for name in self._parts():
            with (self.path / name).open("rb") as file:
                yield from file

    def release(self) -> None:
        """Let another process go on with it. Nothing is removed."""
        self._lock.release()

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """The output is there: say so in the manifest, then remove everything. A kill meanwhile repeats nothing."""
        self._write(MANIFEST, to_json(manifest, indent=2))
        self.remove()

    def remove(self) -> None:
        """Remove all of it, the manifest last."""
        for name in os.listdir(self.path):
            if name not in (LOCK, MANIFEST):
                (self.path / name).unlink()
        (self.path / MANIFEST).unlink(missing_ok=True)
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def _parts(self) -> list[str]:
        """The names of parts, in order of their numbers; what a kill left half written is none."""
        return sorted(n for n in os.listdir(self.path) if n.startswith("part-") and not n.endswith(".tmp"))

    def _clear(self) -> None:
        (self.path / MANIFEST).unlink(missing_ok=True)
        for name in os.listdir(self.path):
            if name != LOCK:
                (self.path / name).unlink()

    def _write(self, name: str, data: bytes, force: bool = True) -> None:
        temporary = self.path / f"{name}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                if force:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.rename(self.path / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise storage(self.path, error) from None


def landing(target: Path) -> Path:
    """Where an output comes to be: what its name leads to, where that is a symbolic link."""
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def beside(target: Path) -> Path:
    """The folder of a job with this output: one, whatever links lead to it."""
    place = landing(target)
    return place.with_name(f"{place.name}.batch")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What a manifest says, None where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}: is not of a bulk job; remove the folder, or name another output")
    return found


def storage(path: Path, error: OSError) -> InsufficientStorageError:
    """What to say of a file that cannot be written."""
    return InsufficientStorageError(f"{path}: {error.strerror or error}; what is done is kept, run the command again")
