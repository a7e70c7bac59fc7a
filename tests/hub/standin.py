"""A stand-in for the hub: a real HTTP server with repositories, gates, tokens, a CDN of its own, and faults to order.

Status codes, error codes and headers are those that huggingface_hub's error handling is written for.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_FROM = 1024  # bytes; larger files come from the CDN, as on the hub


@dataclass
class Repository:
    """Files by revision; `main` is a branch, the keys of `commits` are commits."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    gated: bool = False
    private: bool = False
    readers: set[str] = field(default_factory=set)
    """Tokens that may read a gated or private one."""


@dataclass
class Fault:
    """What goes wrong with the next `times` downloads of a file."""

    times: int = 1
    cut_after: int | None = None
    """Close the connection after so many bytes of the answer."""
    status: int | None = None
    corrupt: bool = False
    ignore_range: bool = False
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A request that arrived."""

    server: str
    method: str
    path: str
    range: str | None
    authorization: str | None


class StandIn:
    """The hub at `endpoint`, its CDN at another origin."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens = {"hf_reader", "hf_stranger"}
        self.seen: list[Seen] = []
        self.faults: dict[str, Fault] = {}
        self.claims: dict[str, int] = {}
        """Sizes by file name that the listing gives instead of the real ones."""
        self.delay = 0.0
        self.before_send: Callable[[str], None] = lambda name: None
        self._lock = threading.Lock()
        self._hub, self._cdn = (_server(self, name) for name in ("hub", "cdn"))
        self.endpoint = f"http://127.0.0.1:{self._hub.server_port}"
        self.cdn = f"http://127.0.0.1:{self._cdn.server_port}"

    def add(self, model: str, files: Mapping[str, bytes], branch: str = "main", **kind: Any) -> str:
        """A new commit on a branch; its hash."""
        listing = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
        commit = hashlib.sha1(json.dumps([model, branch, listing]).encode()).hexdigest()
        repository = self.repositories.setdefault(model, Repository({}, {}, **kind))
        repository.commits[commit] = dict(files)
        repository.branches[branch] = commit
        return commit

    def downloads(self, name: str) -> list[Seen]:
        """The requests for a file's bytes that were answered with bytes or a fault."""
        server = "cdn" if any(seen.server == "cdn" and seen.path.endswith("/" + name) for seen in self.seen) else "hub"
        return [seen for seen in self.seen if seen.server == server and seen.path.endswith("/" + name)]

    def take_fault(self, name: str) -> Fault | None:
        with self._lock:
            fault = self.faults.get(name)
            if fault is None or fault.times == 0:
                return None
            fault.times -= 1
            return fault

    def close(self) -> None:
        for server in (self._hub, self._cdn):
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    standin: StandIn
    name: str

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests, and no news."""


def _server(standin: StandIn, name: str) -> _Server:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.standin, server.name = standin, name
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        standin, path = self.server.standin, unquote(urlsplit(self.path).path)
        authorization = self.headers.get("authorization")
        standin.seen.append(Seen(self.server.name, self.command, path, self.headers.get("range"), authorization))
        token = authorization.removeprefix("Bearer ") if authorization else None
        if self.server.name == "cdn":
            _, model, commit, name = path.split("/", 3)
            self._file(standin.repositories[model.replace("--", "/")].commits[commit][name], name)
        elif path == "/api/agent-harnesses":
            self._answer(404, b"")
        elif token is not None and token not in standin.tokens:
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif path.startswith("/api/models/"):
            model, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            if fault := standin.take_fault(f"/api/models/{model}"):
                self._answer(fault.status or 500, b"busy", fault.headers)
            elif found := self._find(model, revision or "main", token):
                self._info(model, *found)
        else:
            model, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            if found := self._find(model, revision, token):
                self._resolve(model, *found, name, token)

    def _find(self, model: str, revision: str, token: str | None) -> tuple[Repository, str] | None:
        repository = self.server.standin.repositories.get(model)
        if repository is None or (repository.private and token not in repository.readers):
            if token is None:  # the hub does not tell strangers which names exist
                self._refuse(401, "RepoNotFound", "Invalid username or password.")
            else:
                self._refuse(404, "RepoNotFound", "Repository not found")
            return None
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, commit

    def _info(self, model: str, repository: Repository, commit: str) -> None:
        siblings = []
        for name, data in repository.commits[commit].items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            size = self.server.standin.claims.get(name, len(data))
            sibling: dict[str, Any] = {"rfilename": name, "size": size, "blobId": blob}
            if len(data) >= LFS_FROM:
                sha = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": sha, "size": size, "pointerSize": 134}
            siblings.append(sibling)
        info = {
            "id": model, "modelId": model, "sha": commit, "siblings": siblings, "private": repository.private,
            "gated": "manual" if repository.gated else False, "lastModified": "2026-03-01T12:00:00.000Z", "tags": [],
        }  # fmt: skip
        self._answer(200, json.dumps(info).encode(), {"content-type": "application/json"})

    def _resolve(self, model: str, repository: Repository, commit: str, name: str, token: str | None) -> None:
        data = repository.commits[commit].get(name)
        if repository.gated and token not in repository.readers:
            self._refuse(403 if token else 401, "GatedRepo", f"Access to model {model} is restricted.")
        elif data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif len(data) >= LFS_FROM:
            location = f"{self.server.standin.cdn}/{model.replace('/', '--')}/{commit}/{name}"
            linked = {"x-linked-size": str(len(data)), "x-linked-etag": f'"{hashlib.sha256(data).hexdigest()}"'}
            self._answer(302, b"", {"location": location, "x-repo-commit": commit} | linked)
        else:
            self._file(data, name)

    def _file(self, data: bytes, name: str) -> None:
        standin = self.server.standin
        standin.before_send(name)
        fault = standin.take_fault(name)
        if fault and fault.status:
            self._answer(fault.status, b"busy", fault.headers)
            return
        if fault and fault.corrupt:
            data = bytes(byte ^ 0xFF for byte in data)
        wanted, status = self.headers.get("range"), 200
        headers = {"etag": '"x"', "accept-ranges": "bytes"}
        if wanted and not (fault and fault.ignore_range):
            first, last = wanted.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last or len(data) - 1), len(data) - 1) + 1
            headers["content-range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        self.send_response(status)
        for key, value in (headers | {"content-length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(data) if fault is None or fault.cut_after is None else fault.cut_after
        for at in range(0, end, 1 << 16):
            self.wfile.write(data[at : min(at + (1 << 16), end)])
            time.sleep(standin.delay)
        if end < len(data):
            self.close_connection = True

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"x-error-message": message} | ({"x-error-code": code} if code else {})
        self._answer(status, json.dumps({"error": message}).encode(), headers)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "content-length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
