"""HTTP/1.1 below the application: uvicorn's parser, a request's head bounded in size and time, our own refusals.

What is no HTTP never reaches the application; it too gets a JSON body and a request id. Only for servers that run
uvicorn: it is imported here.
"""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sakuradite.errors import InvalidRequestError
from sakuradite.http import refusals

HEAD_SECONDS = 30.0
"""From a connection, or the first byte of its next request, to the end of that request's head. uvicorn itself waits for
ever, so that connections which never say anything would use up the descriptors."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a request line and its headers while they come in; the parser itself would keep them without end."""


class Protocol(HttpToolsProtocol):  # type: ignore[misc]  # uvicorn is skipped by the type checker
    """One connection."""

    _head_bytes: int | None = 0
    """Of the head that is coming in; None while it is the body."""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # the answer to the request before it is still being written
        elif self._head_bytes:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"a request's head has to come within {HEAD_SECONDS:g} seconds")
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._head_bytes or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request's head has at most {MAX_HEAD_BYTES} bytes"
            )
        else:
            self._await_head()  # not for a head that came whole, as most do: a timer costs as much as parsing it

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._head_came()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for whatever its parser cannot read."""
        self._refuse(
            HTTPStatus.BAD_REQUEST, "this is no valid HTTP request: its request line, a header or its length is wrong"
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = refusals.native(InvalidRequestError(message)).body
        id_ = f"req_{secrets.token_hex(12)}"
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {id_}",
            f"x-typesafe-request-id: {id_}",
            "x-content-type-options: nosniff",
            "cache-control: no-store",
            "connection: close",
        )
        self.transport.write("\r\n".join((*head, "", "")).encode() + body)
        self.transport.close()
