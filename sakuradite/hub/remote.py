"""The hub over HTTP: what a repository holds at a commit, small files, ranges, and downloads that resume.

Session, headers, token and proxies are huggingface_hub's. Its own download (2.4) throws a partial file away when it
fails, and counts in steps of 10 MB; hence the loop here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

from sakuradite.errors import (
    APIError,
    HubUnavailableError,
    ModelAccessDeniedError,
    ModelNotFoundError,
    OfflineMissingError,
    UnsupportedModelError,
)
from sakuradite.hub.safety import regular_file_size

logger = logging.getLogger(__name__)

TIMEOUT = 10.0  # seconds without a byte; huggingface_hub's own default
CHUNK = 1 << 20  # bytes read at once to hash a file
ATTEMPTS = 5  # without one new byte, before a download is given up
RETRY_WAIT = 1.0  # seconds before the first retry, doubled for each further one
SMALL_FILE = 64 << 20  # bytes; no file that is read into memory comes near, a broken server could send for ever
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


class Hub:
    """One hub. `endpoint` and `token` default to what huggingface_hub finds: HF_ENDPOINT, HF_TOKEN or a login."""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.token = token

    def snapshot(self, model: str, revision: str) -> RemoteSnapshot:
        """The commit of a revision and its files. Raises ModelNotFoundError, ModelAccessDeniedError or
        HubUnavailableError, each saying what to do.
        """
        with self._errors(model, revision):
            info = HfApi(endpoint=self.endpoint, token=self.token).model_info(
                model, revision=revision, files_metadata=True, timeout=TIMEOUT
            )
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

    def read(self, snapshot: RemoteSnapshot, name: str) -> bytes:
        """A small file, whole."""
        file = snapshot.files[name]
        if file.size > SMALL_FILE:
            raise UnsupportedModelError(f"{name} of {snapshot.model} has {file.size} bytes, more than any such file")
        return self.read_range(snapshot, name, 0, file.size)

    def read_range(self, snapshot: RemoteSnapshot, name: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a file."""
        with self._errors(snapshot.model, snapshot.commit):
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
        with self._errors(snapshot.model, snapshot.commit):
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
        headers = build_hf_headers(token=self.token) | {"accept-encoding": "identity"}
        if start or stop is not None:
            headers["range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        url = hf_hub_url(snapshot.model, name, revision=snapshot.commit, endpoint=self.endpoint)
        for attempt in range(ATTEMPTS):
            with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
                if response.status_code not in (408, 429, 500, 502, 503, 504) or attempt == ATTEMPTS - 1:
                    hf_raise_for_status(response)
                    yield response
                    return
                wait = response.headers.get("retry-after", "")
            time.sleep(min(float(wait) if wait.isdigit() else RETRY_WAIT * 2**attempt, 30.0))

    @contextmanager
    def _errors(self, model: str, revision: str) -> Iterator[None]:
        try:
            yield
        except OfflineModeIsEnabled:
            raise OfflineMissingError(f"HF_HUB_OFFLINE is set, and {model} was to be fetched") from None
        except HfHubHTTPError as error:
            raise self._refusal(error, model, revision) from None
        except httpx2.HTTPError as error:
            raise HubUnavailableError(
                f"{self.endpoint} cannot be reached ({str(error) or type(error).__name__}). Check the network, a proxy "
                "(HTTPS_PROXY) or HF_ENDPOINT; with offline=True (--offline) only files that are already here are used."
            ) from None

    def _refusal(self, error: HfHubHTTPError, model: str, revision: str) -> APIError:
        """The error that tells a caller what to do about the hub's answer."""
        status, page = error.response.status_code, f"{self.endpoint}/{model}"
        told = error.response.headers.get("x-error-message", "")
        token = (self.token or get_token()) is not None
        where = "on the machine that downloads (the daemon's, where one runs)"
        if isinstance(error, GatedRepoError):
            step = (
                "the token that is set has no access yet: with its account"
                if token
                else f"no token is set: put one with read access into HF_TOKEN, or run `hf auth login`, {where}, and"
            )
            return ModelAccessDeniedError(f"{model} is gated, and {step} accept the terms at {page}.", param="model")
        if status == 401 and token and "RepoNotFound" not in error.response.headers.get("x-error-code", ""):
            return ModelAccessDeniedError(
                f"The hub does not accept the token that is set. Replace HF_TOKEN, or run `hf auth login` again, "
                f"{where}; a public model needs none.",
                param="model",
            )
        if isinstance(error, RevisionNotFoundError):
            return ModelNotFoundError(
                f"{model} has no revision {revision!r}; its branches and tags are at {page}/tree/main", param="revision"
            )
        if isinstance(error, EntryNotFoundError):
            return ModelNotFoundError(f"{model} at {revision}: a file that it lists is missing from the hub")
        if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
            private = (
                "or it is private and the token that is set does not see it"
                if token
                else f"or it is private (then put a token into HF_TOKEN, or run `hf auth login`, {where})"
            )
            return ModelNotFoundError(
                f"The hub has no model {model!r}: check the spelling at {self.endpoint}/models, {private}.",
                param="model",
            )
        if isinstance(error, DisabledRepoError) or status == 403:
            return ModelAccessDeniedError(
                f"The hub refuses {model} ({told or 'forbidden'}). Check the token's permissions and {page}.",
                param="model",
            )
        after = error.response.headers.get("retry-after", "")
        return HubUnavailableError(
            f"{self.endpoint} answered {status} {told}".strip() + "; try again later",
            retry_after=float(after) if after.isdigit() else None,
        )


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
