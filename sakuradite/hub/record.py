"""model.json of the store: which revisions, commits and files of a model are here, and whether they are whole."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ValidationError

from sakuradite.hub.files import open_private
from sakuradite.hub.names import COMMIT
from sakuradite.hub.safety import regular_file_size
from sakuradite.hub.selection import TEMPLATES

RECORD = "model.json"


class StoredFile(BaseModel):
    """A file as the hub listed it."""

    size: int
    digest: str


class StoredSnapshot(BaseModel):
    """A commit's files. Times are in seconds since the epoch; `released` is the hub's."""

    files: dict[str, StoredFile]
    released: int | None = None
    pulled: float = 0.0


class Record(BaseModel):
    """model.json: which commit each revision stood for when it was last pulled, and the commits that are here."""

    model: str
    revisions: dict[str, str] = {}
    snapshots: dict[str, StoredSnapshot] = {}


def read_record(folder: Path) -> Record | None:
    """model.json of a model's folder; None where it is missing or cannot be understood (a pull then writes it anew)."""
    path = folder / RECORD
    if folder.is_symlink() or regular_file_size(path) is None:
        return None
    try:
        record = Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return record if all(COMMIT.fullmatch(commit) for commit in record.snapshots) else None


def commit_of(record: Record, revision: str) -> str | None:
    """The stored commit of a branch, a tag, a commit, or the unique start (seven digits) of a commit."""
    commit = record.revisions.get(revision)
    if commit is None and len(revision) >= 7:
        starts = [commit for commit in record.snapshots if commit.startswith(revision)]
        commit = starts[0] if len(starts) == 1 else None
    return commit if commit in record.snapshots else None


def is_whole(folder: Path, snapshot: StoredSnapshot) -> bool:
    """Whether every listed file is there, plain and of its size."""
    if folder.is_symlink() or (folder / TEMPLATES).is_symlink():
        return False
    return all(regular_file_size(folder / name) == file.size for name, file in snapshot.files.items())


def write_record(folder: Path, record: Record) -> None:
    draft = folder / (RECORD + ".new")
    draft.unlink(missing_ok=True)
    with open_private(draft) as file:
        file.write(record.model_dump_json(indent=1).encode())
        os.fsync(file.fileno())
    draft.rename(folder / RECORD)
    sync(folder)


def sync(folder: Path) -> None:
    """Have the names in a folder survive a power cut."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
