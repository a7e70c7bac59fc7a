"""The managed checkpoints under `<home>/models`: pull, find, list, remove.

    models/                         entered by its owner alone; may itself be a link to another disk
      .locks/org--name.lock         held while a model is pulled or removed
      org--name/
        model.json                  what is here: revisions, commits, files with their sizes and hashes
        <commit>/                   a whole checkpoint: plain files, no links
        <commit>.partial/           a download on its way: `x.part` grows, `x` is whole and its hash was checked

A snapshot counts as whole when model.json lists it and every file has its listed size, and its folder gets its name
only after the last file was checked. Old snapshots stay until `remove`: a replica that restarts needs its commit.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import is_offline_mode

from sakuradite.errors import (
    ConfigurationError,
    InsufficientStorageError,
    InvalidLifecycleError,
    ModelNotFoundError,
    OfflineMissingError,
    UnsupportedModelError,
)
from sakuradite.hub import cache
from sakuradite.hub.names import COMMIT, check_hub_id, check_revision, is_hub_id
from sakuradite.hub.record import (
    Record,
    StoredFile,
    StoredSnapshot,
    commit_of,
    is_whole,
    read_record,
    sync,
    write_record,
)
from sakuradite.hub.registry import check_code
from sakuradite.hub.remote import Hub, RemoteFile, RemoteSnapshot
from sakuradite.hub.safety import json_object, private_folder, regular_file_size
from sakuradite.hub.selection import CONFIG, folder_sizes, select
from sakuradite.hub.transfer import FULL, REPORT_EVERY, OnProgress, arrived, fetch, silent
from sakuradite.operations import Progress

PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of the store. `revision` is the commit, `bytes` what the whole model takes on disk (all its commits).

    With `managed` false it is a snapshot of Hugging Face's cache that is used offline, where it lies.
    """

    model: str
    revision: str | None
    path: Path
    bytes: int
    complete: bool
    released: int | None = None
    pulled: float | None = None
    managed: bool = True


class Store:
    """The checkpoints that this package downloaded. Safe to use from several threads and processes at once."""

    def __init__(self, home: Path, hub: Hub | None = None) -> None:
        self.home = home
        self.root = home / "models"
        self.hub = hub or Hub()

    def find(self, model: str, revision: str | None = None) -> StoredModel | None:
        """The whole checkpoint of a revision, if it is here. No network; what a branch stood for at the last pull."""
        folder, record = self._folder(model), self._record(model)
        if record is None or (commit := commit_of(record, check_revision(revision))) is None:
            return None
        return self._stored(folder, record, commit) if is_whole(folder / commit, record.snapshots[commit]) else None

    def pull(
        self,
        model: str,
        revision: str | None = None,
        offline: bool = False,
        progress: OnProgress = silent,
    ) -> StoredModel:
        """Download what a revision stands for now, unless it is here, and remember its commit.

        A download that broke off goes on where it ended; several processes that ask for one model download it once.
        Files of Hugging Face's cache are used instead of the network once their hash was checked. `progress` is called
        in the caller's thread; an exception that it raises stops the download and keeps what has arrived.
        Offline, what is in the store is returned, else a complete snapshot of Hugging Face's cache.

        Raises UnsupportedModelError (refused before the download), InsufficientStorageError, OfflineMissingError,
        ModelNotFoundError, ModelAccessDeniedError, HubUnavailableError.
        """
        check_hub_id(model)
        name = check_revision(revision)
        if offline or is_offline_mode():
            if found := self.find(model, revision) or _cached(model, name):
                return found
            raise self._missing(model, revision, offline)
        progress(Progress(phase="resolving"))
        remote = self.hub.snapshot(model, name)
        if not COMMIT.fullmatch(remote.commit):
            raise UnsupportedModelError(f"the hub named {remote.commit!r} as the commit of {model}")
        with self._disk_errors(), self._lock(model, remote.commit, progress):
            folder = self._folder(model)
            if os.path.lexists(folder):
                private_folder(folder)
            record = self._record(model) or Record(model=model)
            snapshot = record.snapshots.get(remote.commit)
            if snapshot is None or not is_whole(folder / remote.commit, snapshot):
                wanted, partial = self._plan(remote), folder / (remote.commit + PARTIAL)
                if (damaged := folder / remote.commit).exists():  # it was whole, and has lost a file since
                    shutil.rmtree(damaged) if partial.exists() else damaged.rename(partial)
                snapshot = StoredSnapshot(
                    files={file.name: StoredFile(size=file.size, digest=file.digest) for file in wanted},
                    released=remote.released,
                    pulled=time.time(),
                )
                sources = {file.name: source for file in wanted if (source := _source(remote, file, folder, record))}
                fetch(self.hub, remote, wanted, partial, sources, progress, disk=self.root.resolve())
                record.snapshots[remote.commit] = snapshot
            record.revisions |= {name: remote.commit, remote.commit: remote.commit}
            write_record(folder, record)
            _publish(folder, remote.commit)
            for stale in folder.glob("*" + PARTIAL):  # of commits that were given up
                shutil.rmtree(stale)
            size = sum(file.size for file in snapshot.files.values())
            progress(Progress(phase="done", bytes_done=size, bytes_total=size))
            return self._stored(folder, record, remote.commit)

    def list(self) -> Sequence[StoredModel]:
        """Every model of the store, by name. Those without a whole checkpoint have `complete` false."""
        if not self.root.is_dir():
            return []
        found = []
        for folder in sorted(path for path in self.root.resolve().iterdir() if path.is_dir()):
            model = folder.name.replace("--", "/")
            if not is_hub_id(model):  # .locks, and what somebody else put here
                continue
            record = self._record(model)
            whole = [c for c, s in record.snapshots.items() if is_whole(folder / c, s)] if record else []
            if record and whole:
                found.append(self._stored(folder, record, max(whole, key=lambda c: record.snapshots[c].pulled)))
            else:
                found.append(StoredModel(model, None, folder, _disk_bytes(folder), complete=False))
        return found

    def remove(self, model: str) -> int:
        """Delete a model, partial downloads too; the bytes that became free. The caller knows that it is not loaded.

        Raises ModelNotFoundError when it is not in the store, InvalidLifecycleError while it is being downloaded.
        """
        if not is_hub_id(model):
            raise ModelNotFoundError(
                f"{model!r} is not in the store {self.root}; what is named by a path is yours, and never deleted",
                param="model",
            )
        folder = self._folder(model)
        if not folder.is_dir():
            raise ModelNotFoundError(f"{model} is not in the store {self.root}", param="model")
        try:
            with self._disk_errors(), FileLock(self._lock_file(model), timeout=0, mode=0o600):
                freed, gone = _disk_bytes(folder), folder.with_name(f".removed-{folder.name}")
                if gone.exists():  # an earlier removal was cut off
                    shutil.rmtree(gone)
                folder.rename(gone)  # in one step: nobody finds half a model
                shutil.rmtree(gone)
        except Timeout:
            raise InvalidLifecycleError(f"{model} is being downloaded; wait for that to end, or cancel it") from None
        return freed

    def _missing(self, model: str, revision: str | None, offline: bool) -> OfflineMissingError:
        switch = "offline=True (--offline) was given" if offline else "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
        record = self._record(model)
        others = sorted(record.revisions) if record else []
        held = f" Stored revisions: {', '.join(others)}." if others else ""
        return OfflineMissingError(
            f"{model} (revision {revision or 'main'}) is neither in the store {self._folder(model)} nor in the cache "
            f"{cache.folder()} (HF_HUB_CACHE), and {switch}.{held} Pull it once with a network: "
            f"sakuradite pull {model}",
            param="model",
        )

    def _plan(self, remote: RemoteSnapshot) -> Sequence[RemoteFile]:
        """The files to fetch, small ones first. Raises UnsupportedModelError before anything is written."""
        try:
            selection = select(remote.sizes, lambda name: self.hub.read(remote, name))
            check_code(json_object(self.hub.read(remote, CONFIG), CONFIG))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{remote.model} is refused: {error.message}", param="model") from None
        return [remote.files[name] for name in selection.names]

    @contextmanager
    def _lock(self, model: str, commit: str, progress: OnProgress) -> Iterator[None]:
        """Hold the model. While another process has it, `progress` tells how far that one is."""
        lock = FileLock(self._lock_file(model), mode=0o600)
        while True:
            try:
                lock.acquire(timeout=REPORT_EVERY)
                break
            except Timeout:
                found = arrived(self._folder(model) / (commit + PARTIAL))
                progress(Progress(phase="waiting", bytes_done=found))
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Errors that say which disk or folder is at fault, and what to do."""
        try:
            yield
        except Timeout:
            raise
        except OSError as error:
            where = f"the store {self.root} cannot be used: {error.strerror or error} ({error.filename or ''})"
            if error.errno in FULL:
                raise InsufficientStorageError(f"{where}; make room, or move the home (SAKURADITE_HOME)") from None
            raise ConfigurationError(f"{where}; mend it, or choose another home (SAKURADITE_HOME)") from None

    def _lock_file(self, model: str) -> Path:
        self._make_root()
        return private_folder(self.root / ".locks") / f"{_folder_name(model)}.lock"

    def _make_root(self) -> None:
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_folder(self.root.resolve() if self.root.is_symlink() else self.root)

    def _folder(self, model: str) -> Path:
        check_hub_id(model)
        return self.root.resolve() / _folder_name(model)

    def _record(self, model: str) -> Record | None:
        return read_record(self._folder(model))

    def _stored(self, folder: Path, record: Record, commit: str) -> StoredModel:
        snapshot = record.snapshots[commit]
        return StoredModel(
            record.model, commit, folder / commit, _disk_bytes(folder), True, snapshot.released, snapshot.pulled
        )


def _cached(model: str, revision: str) -> StoredModel | None:
    found = cache.complete_snapshot(model, revision)
    if found is None:
        return None
    size = sum(folder_sizes(found).values())
    return StoredModel(model, found.name, found, size, complete=True, managed=False)


def _folder_name(model: str) -> str:
    return model.replace("/", "--")  # ids hold no "--", so no two share a folder


def _publish(folder: Path, commit: str) -> None:
    """Give a partial folder, all of whose files are whole, the name of its commit."""
    partial = folder / (commit + PARTIAL)
    if (folder / commit).exists() or not partial.exists():
        return
    for leftover in partial.rglob("*.part"):
        leftover.unlink()
    partial.rename(folder / commit)
    sync(folder)


def _source(remote: RemoteSnapshot, file: RemoteFile, folder: Path, record: Record) -> Path | None:
    """A file here that may be the wanted one: in another commit of the store, or in Hugging Face's cache."""
    for commit, snapshot in record.snapshots.items():
        known = snapshot.files.get(file.name)
        if known and known.digest == file.digest and regular_file_size(folder / commit / file.name) == file.size:
            return folder / commit / file.name
    cached = cache.snapshot(remote.model, remote.commit)
    found = cache.file(cached, file.name) if cached else None
    return found if found and found.stat().st_size == file.size else None


def _disk_bytes(folder: Path) -> int:
    """Bytes of the files under a folder, those that several commits share counted once."""
    seen: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            found = path.lstat()
            if not path.is_dir():
                seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())
