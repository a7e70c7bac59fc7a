"""HTTP/1.1 below the application: uvicorn's parser, with a bound on a request's head and refusals in our own words.

What is no HTTP never reaches the application; it too gets a JSON body and a request id. Only for servers that run
uvicorn: it is imported here.
"""

from __future__ import annotations

import secrets
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sakuradite.errors import InvalidRequestError
from sakuradite.http import refusals

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line and its headers while they come in; the parser itself would keep them without end."""


class Protocol(HttpToolsProtocol):  # type: ignore[misc]  # uvicorn is skipped by the type checker
    """One connection."""

    _head_bytes: int | None = 0
    """Of the head that is coming in; None while it is the body."""

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request's head has at most {MAX_HEAD_BYTES} bytes"
            )

    def on_headers_complete(self) -> None:
        self._head_bytes = None
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
