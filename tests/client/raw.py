"""A server that misbehaves on purpose: it writes given bytes, waits, or hangs up, whatever it is asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import orjson

type Step = bytes | float | Callable[[], object]
"""Bytes to send, seconds to wait, or something to do. After the last one the connection is closed."""


class RawServer:
    """Answers the n-th request with the n-th script, all later ones with the last. `requests` are what came."""

    def __init__(self, *scripts: list[Step], host: str = "127.0.0.1", keep_open: bool = False) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._scripts, self._keep_open = scripts, keep_open
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        self.requests: list[bytes] = []
        self.connections = 0
        self.stopped = threading.Event()
        self.gone = threading.Event()
        """Set when a client hung up before its answer was complete."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self.stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while (request := _request(connection)) is not None:
                self.requests.append(request)
                script = self._scripts[min(len(self.requests), len(self._scripts)) - 1]
                for step in script:
                    if not self._do(connection, step):
                        self.gone.set()
                        return
                if not self._keep_open:
                    return

    def _do(self, connection: socket.socket, step: Step) -> bool:
        try:
            if isinstance(step, bytes):
                connection.sendall(step)
            elif isinstance(step, float):
                connection.settimeout(step)
                try:
                    if connection.recv(1) == b"":
                        return False
                except TimeoutError:
                    pass
                connection.settimeout(None)
            else:
                step()
        except OSError:
            return False
        return True


def _request(connection: socket.socket) -> bytes | None:
    """A whole request with a Content-Length, None when the client closed."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            if not (chunk := connection.recv(65536)):
                return None
            data += chunk
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length")), 0
        )
        while len(body) < length:
            body += connection.recv(65536)
    except OSError:
        return None
    return head + b"\r\n\r\n" + body


def reply(status: int, body: object, *headers: str, reason: str = "X") -> bytes:
    """A whole response; `body` is bytes, or anything for JSON."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    kind = (
        []
        if any(header.lower().startswith("content-type") for header in headers)
        else ["content-type: application/json"]
    )
    lines = [f"HTTP/1.1 {status} {reason}", *kind, f"content-length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def error(status: int, code: str, message: str = "no", *headers: str, **fields: Any) -> bytes:
    """An error in the body of the contract."""
    return reply(status, {"error": {"code": code, "message": message, "type": "x", "param": None}, **fields}, *headers)


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"


def frame(event: str, **payload: Any) -> bytes:
    """One server-sent event whose payload's type is its name, unless given otherwise."""
    return f"event: {event}\ndata: ".encode() + orjson.dumps({"type": event} | payload) + b"\n\n"
