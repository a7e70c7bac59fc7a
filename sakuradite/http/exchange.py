"""One HTTP request and its reply, without a framework."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sakuradite.http.body import Receive
from sakuradite.http.observing import Account

type Send = Callable[[dict[str, Any]], Awaitable[None]]
type Scope = dict[str, Any]

VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
JSON = b"application/json"
HTML = b"text/html; charset=utf-8"
EVENTS = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Reply:
    """What to send back. A HEAD request gets the same headers and no body."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Exchange:
    """A request as the handlers see it, and the way back to the caller.

    `id` is what every response carries; `key` is unique among the requests of all routers, which the caller's own id
    need not be.
    """

    __slots__ = (
        "account",
        "headers",
        "id",
        "key",
        "method",
        "parameters",
        "path",
        "receive",
        "scope",
        "send",
        "started",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.method: str = scope["method"]
        self.path = _path(scope)
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.parameters: dict[str, str] = {}
        self.started = time.perf_counter()
        self.status = 0
        self.account = Account()
        unique = secrets.token_hex(12)
        sent = self.headers.get(b"x-request-id") or self.headers.get(b"x-typesafe-request-id")
        if sent is not None and VALID_ID.fullmatch(sent):
            self.id, self.key = sent.decode(), f"{sent.decode()}/{unique}"
        else:
            self.id = self.key = f"req_{unique}"

    @property
    def content_type(self) -> str:
        """The Content-Type as sent, empty when absent."""
        return self.headers.get(b"content-type", b"").decode("latin-1").strip()

    async def start(
        self, status: int, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...], length: int | None
    ) -> None:
        """Send the status line and headers; both names of the request id are always among them."""
        self.status = status
        self.account.first = time.perf_counter() - self.started
        id_ = self.id.encode()
        sent = [
            (b"content-type", content_type),
            (b"x-request-id", id_),
            (b"x-typesafe-request-id", id_),
            (b"x-content-type-options", b"nosniff"),
            (b"cache-control", b"no-store"),
            *headers,
        ]
        if length is not None:
            sent.append((b"content-length", b"%d" % length))
        await self.send({"type": "http.response.start", "status": status, "headers": sent})

    async def reply(self, reply: Reply) -> None:
        """Send a whole reply."""
        await self.start(reply.status, reply.content_type, reply.headers, len(reply.body))
        body = b"" if self.method == "HEAD" else reply.body
        await self.send({"type": "http.response.body", "body": body})


def _path(scope: Scope) -> str:
    """The path below the prefix that a proxy in front of the application took over, if any."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path
