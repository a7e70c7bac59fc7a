"""The hub over HTTP: what a repository holds at a commit, small files, ranges, and downloads that resume.

Session, headers, token and proxies are huggingface_hub's. Its own download (2.4) throws a partial file away when it
fails, and loses up to 10 MB of what has arrived when a connection breaks; hence the loop here.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    get_session,
    hf_hub_download,
    hf_hub_url,
    hf_raise_for_status,
)
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]  # exported lazily

from sakuradite.errors import HubUnavailableError, UnsupportedModelError
from sakuradite.hub.denied import hub_errors
from sakuradite.hub.files import digest_of, open_private
from sakuradite.hub.safety import private_folder, regular_file_size

logger = logging.getLogger(__name__)

TIMEOUT = 10.0  # seconds without a byte; huggingface_hub's own default
ATTEMPTS = 5  # without one new byte, before a download is given up
RETRY_WAIT = 1.0  # seconds before the first retry, doubled for each further one
SMALL_FILE = 64 << 20  # bytes; no file that is read into memory comes near, a broken server could send for ever
LIBRARY = "sakuradite"  # for the hub's statistics, as its libraries do
BUSY = (408, 429, 500, 502, 503, 504)
MAX_WAIT = 30.0  # seconds; a hub that asks for more patience gets it from the caller
MAX_OVER_HTTP = constants.MAX_HTTP_DOWNLOAD_SIZE  # bytes (50 GB)
TRANSIENT = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit. `digest` is `sha256:…` of its bytes, or `git:…`, the hash of a git blob."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class RemoteSnapshot:
    """What a repository holds at the commit that a revision stood for. `released` is in seconds since the epoch."""

    model: str
    commit: str
    files: dict[str, RemoteFile]
    released: int | None

    @property
    def sizes(self) -> dict[str, int]:
        return {name: file.size for name, file in self.files.items()}


class Stopped(Exception):
    """The download was asked to end; what has arrived stays for the next one."""


class _NoBar(tqdm):
    """A progress bar that nobody sees: how far a download is, the growing file tells."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]


class Hub:
    """One hub. `endpoint` and `token` default to what huggingface_hub finds: HF_ENDPOINT, HF_TOKEN or a login."""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.token = token

    def snapshot(self, model: str, revision: str) -> RemoteSnapshot:
        """The commit of a revision and its files. Raises ModelNotFoundError, ModelAccessDeniedError or
        HubUnavailableError, each saying what to do.
        """
        with hub_errors(self.endpoint, self.token, model, revision):
            info = self._model_info(model, revision)
        if not info.sha:
            raise HubUnavailableError(f"{self.endpoint} named no commit for {model} at {revision}")
        files = {}
        for sibling in info.siblings or ():
            if sibling.size is None or (sibling.lfs is None and sibling.blob_id is None):
                continue  # without size and hash a file cannot be told from a partial one; none of ours is like that
            digest = f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"git:{sibling.blob_id}"
            files[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size, digest)
        released = int(info.last_modified.timestamp()) if info.last_modified else None
        return RemoteSnapshot(model, info.sha, files, released)

    def _model_info(self, model: str, revision: str) -> ModelInfo:
        api = HfApi(endpoint=self.endpoint, token=self.token, library_name=LIBRARY)
        for attempt in range(ATTEMPTS):
            try:
                return api.model_info(model, revision=revision, files_metadata=True, timeout=TIMEOUT)
            except HfHubHTTPError as error:
                if error.response.status_code not in BUSY or attempt == ATTEMPTS - 1:
                    raise
                time.sleep(_wait(error.response, attempt))
        raise AssertionError("unreachable")

    def read(self, snapshot: RemoteSnapshot, name: str) -> bytes:
        """A small file, whole."""
        file = snapshot.files[name]
        if file.size > SMALL_FILE:
            raise UnsupportedModelError(f"{name} of {snapshot.model} has {file.size} bytes, more than any such file")
        return self.read_range(snapshot, name, 0, file.size)

    def read_range(self, snapshot: RemoteSnapshot, name: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a file."""
        with hub_errors(self.endpoint, self.token, snapshot.model, snapshot.commit):
            for attempt in range(ATTEMPTS):
                try:
                    return self._range(snapshot, name, start, stop)
                except TRANSIENT:
                    if attempt == ATTEMPTS - 1:
                        raise
                    time.sleep(RETRY_WAIT * 2**attempt)
        raise AssertionError("unreachable")

    def _range(self, snapshot: RemoteSnapshot, name: str, start: int, stop: int) -> bytes:
        data = bytearray()
        with self._open(snapshot, name, start, stop) as response:
            skip = start if response.status_code == 200 else 0  # a server without ranges sends it all
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) >= skip + stop - start:
                    break
        if len(data) < skip + stop - start:
            raise httpx2.RemoteProtocolError(f"{len(data)} of {skip + stop - start} bytes of {name} came")
        return bytes(data[skip : skip + stop - start])

    def download(self, snapshot: RemoteSnapshot, name: str, target: Path, stop: threading.Event) -> None:
        """Make `target` the whole file, going on where a partial one ends, its hash checked.

        When `stop` is set, Stopped is raised and the partial file stays. A transfer that breaks off is taken up again
        as long as some bytes come each time. Raises OSError when the disk is full.
        """
        file, failures, rejected = snapshot.files[name], 0, 0
        with hub_errors(self.endpoint, self.token, snapshot.model, snapshot.commit):
            if file.size > MAX_OVER_HTTP:
                self._download_large(snapshot, file, target)
            while True:
                have = regular_file_size(target)
                if have is not None and have >= file.size:
                    if have == file.size and digest_of(target, file.digest) == file.digest:
                        return
                    rejected += 1
                    if rejected > 1:
                        raise HubUnavailableError(f"{name} of {snapshot.model} arrived twice with a wrong hash")
                    logger.warning("%s of %s has a wrong hash; it is fetched from the start", name, snapshot.model)
                    target.unlink()
                    have = None
                try:
                    self._append(snapshot, file, target, have or 0, stop)
                except TRANSIENT as error:
                    arrived = regular_file_size(target) or 0
                    failures = 0 if arrived > (have or 0) else failures + 1
                    if failures >= ATTEMPTS:
                        raise
                    logger.warning("%s of %s broke off at %d bytes (%r)", name, snapshot.model, arrived, error)
                    if stop.wait(RETRY_WAIT * 2**failures):
                        raise Stopped from None

    def _download_large(self, snapshot: RemoteSnapshot, file: RemoteFile, target: Path) -> None:
        """A file that the hub does not serve over plain HTTP: by huggingface_hub (Xet), from the start, not to be
        stopped.
        """
        if regular_file_size(target) == file.size:
            return
        folder = target.with_name(f"{target.name}.large")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            fetched = hf_hub_download(
                snapshot.model, file.name, revision=snapshot.commit, local_dir=private_folder(folder),
                endpoint=self.endpoint, token=self.token, library_name=LIBRARY, tqdm_class=_NoBar,
            )  # fmt: skip
            Path(fetched).chmod(0o600)
            Path(fetched).replace(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _append(
        self, snapshot: RemoteSnapshot, file: RemoteFile, target: Path, have: int, stop: threading.Event
    ) -> None:
        with self._open(snapshot, file.name, have, None) as response, open_private(target) as out:
            if have and response.status_code == 200:  # the server does not know ranges: from the start
                out.truncate(0)
                have = 0
            for chunk in response.iter_bytes():
                if stop.is_set():
                    raise Stopped
                out.write(chunk)
                have += len(chunk)
                if have > file.size:
                    return  # longer than it was listed: the hash will tell
            os.fsync(out.fileno())
        if have < file.size:
            raise httpx2.RemoteProtocolError(f"{have} of {file.size} bytes came")

    @contextmanager
    def _open(self, snapshot: RemoteSnapshot, name: str, start: int, stop: int | None) -> Iterator[httpx2.Response]:
        """A response for a part of a file. The token goes to the hub alone, not to where it sends us for the bytes."""
        headers = build_hf_headers(token=self.token, library_name=LIBRARY) | {"accept-encoding": "identity"}
        if start or stop is not None:
            headers["range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        url = hf_hub_url(snapshot.model, name, revision=snapshot.commit, endpoint=self.endpoint)
        for attempt in range(ATTEMPTS):
            with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
                if response.status_code not in BUSY or attempt == ATTEMPTS - 1:
                    hf_raise_for_status(response)
                    yield response
                    return
            time.sleep(_wait(response, attempt))


def _wait(response: httpx2.Response, attempt: int) -> float:
    """Seconds until the next attempt: what the hub asks for, else a wait that doubles."""
    asked = response.headers.get("retry-after", "")
    return min(float(asked) if asked.isdigit() else RETRY_WAIT * 2**attempt, MAX_WAIT)
