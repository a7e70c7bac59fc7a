"""Bringing the files of a commit into a folder: several at once, from the disk where they are known, with progress."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from sakuradite.errors import InsufficientStorageError
from sakuradite.hub.files import digest_of
from sakuradite.hub.remote import Hub, RemoteFile, RemoteSnapshot
from sakuradite.hub.safety import private_folder, regular_file_size
from sakuradite.operations import Progress

type OnProgress = Callable[[Progress], None]

FULL = (errno.ENOSPC, errno.EDQUOT)  # what a full disk, or a used-up quota, says
WORKERS = 4  # files at once: enough to fill a line, few enough for the hub's rate limits
REPORT_EVERY = 0.2  # seconds between two reports of progress
PART = ".part"  # the end of a file's name while it grows; without it, the file is whole and its hash was checked


def silent(progress: Progress) -> None:
    """For who does not want to know."""


def fetch(
    hub: Hub,
    remote: RemoteSnapshot,
    wanted: Sequence[RemoteFile],
    folder: Path,
    sources: Mapping[str, Path],
    progress: OnProgress,
    disk: Path,
) -> None:
    """Bring every wanted file into `folder`, whole and with its hash checked. `disk` is a folder of the same disk.

    What an earlier call left there is kept or gone on with. `sources` are files on disk that may be the wanted ones;
    they are linked where possible, copied elsewhere. Raises InsufficientStorageError before the first byte when the
    disk is too small, or later when something else has filled it.
    """
    missing = [file for file in wanted if regular_file_size(folder / file.name) != file.size]
    _check_room(remote, missing, sources, folder, disk)
    for place in (folder.parent, folder, *((folder / file.name).parent for file in wanted)):
        private_folder(place)
    total, stop = sum(file.size for file in wanted), threading.Event()

    def bring(file: RemoteFile) -> None:
        part = folder / (file.name + PART)
        if not (file.name in sources and _take(sources[file.name], part, file.digest)):
            hub.download(remote, file.name, part, stop)
        part.replace(folder / file.name)

    def report() -> None:
        progress(Progress(phase="downloading", bytes_done=min(arrived(folder), total), bytes_total=total))

    report()
    try:
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="pull") as workers:
            pending: set[Future[None]] = {workers.submit(bring, file) for file in missing}
            try:
                while pending:
                    ended, pending = wait(pending, REPORT_EVERY, FIRST_EXCEPTION)
                    for future in ended:
                        future.result()
                    report()
            finally:
                stop.set()
                for future in pending:
                    future.cancel()
    except OSError as error:
        if error.errno in FULL:
            raise InsufficientStorageError(
                f"The disk of {disk} became full while {remote.model} was downloaded: {arrived(folder)} of "
                f"{total} bytes are there, {free_bytes(disk)} are free. Make room and pull again; it goes on where "
                "it ended."
            ) from None
        raise


def arrived(folder: Path) -> int:
    """Bytes in the folder of a download that may be going on."""
    total = 0
    with suppress(OSError):  # the folder gets its final name when another process is done with it
        for path in folder.rglob("*"):
            total += regular_file_size(path) or 0
    return total


def free_bytes(path: Path) -> int:
    """What the caller may still write to the disk of a path."""
    return shutil.disk_usage(path).free


def _check_room(
    remote: RemoteSnapshot, missing: Sequence[RemoteFile], sources: Mapping[str, Path], folder: Path, disk: Path
) -> None:
    needed = sum(
        file.size - (regular_file_size(folder / (file.name + PART)) or 0)
        for file in missing
        if not (file.name in sources and _can_link(sources[file.name], disk))
    )
    free = free_bytes(disk)
    if needed > free:
        raise InsufficientStorageError(
            f"{remote.model} needs {needed} more bytes on the disk of {disk}, {free} are free. Make room "
            "(sakuradite list, sakuradite rm), or move the home (SAKURADITE_HOME)."
        )


def _take(source: Path, target: Path, digest: str) -> bool:
    """Make `target` the file `source`, linked or copied; false when its content is not what `digest` says."""
    if digest_of(source, digest) != digest:
        return False
    target.unlink(missing_ok=True)
    if _can_link(source, target.parent):
        os.link(source, target)
    else:
        shutil.copyfile(source, target)
        target.chmod(0o600)
    return True


def _can_link(source: Path, folder: Path) -> bool:
    """Whether a file can be shared by a hard link: on the same disk, and nobody else may write to it."""
    found = source.stat()
    return (
        os.name == "posix"
        and found.st_dev == folder.stat().st_dev
        and found.st_uid == os.geteuid()
        and not found.st_mode & 0o022
    )
