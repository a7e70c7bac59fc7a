"""What the HTTP application adds to uvicorn: the same 1.1 KB request to a trivial application and to ours.

    python -m tests.benchmarks.http.overhead [seconds]

Ours stands over a gateway that answers at once, so that nothing but HTTP is measured: reading, authentication, strict
JSON, validation, the engine's record, the answer. One connection, then 16; client and server in two processes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from typing import Any

import uvicorn

from sakuradite.config import ServerConfig
from sakuradite.http.app import App
from tests.http.serving import MODEL, FakeAdministration, ScriptedGateway, even

KEY = "sk-benchmark"
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "The customer asks for money back."},
    "team": {"type": "choice", "instructions": "Which team?", "criteria": {"billing": "money", "technical": None}},
    "mood": {"type": "score", "instructions": "How frustrated?", "criteria": ["calm", "frustrated", "very angry"]},
    "urgent": {"type": "noul", "instructions": "It cannot wait until tomorrow."},
}
BODY = json.dumps({"model": MODEL, "state": "I was charged twice. " * 30, "questions": QUESTIONS}).encode()


async def trivial(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body and answers with 600 bytes."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"600")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * 600})


async def at_once(request: Any) -> Any:
    """All answers in one group."""
    yield [even(request, i) for i in range(len(request.questions))]


class Connection(asyncio.Protocol):
    """One keep-alive connection that sends the request again and again."""

    def __init__(self, request: bytes) -> None:
        self.request, self.buffer = request, b""
        self.waiter: asyncio.Future[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head > 0:
            at = self.buffer.lower().index(b"content-length:") + 15
            if len(self.buffer) >= head + 4 + int(self.buffer[at : self.buffer.index(b"\r", at)]):
                assert self.buffer.startswith(b"HTTP/1.1 200"), self.buffer
                self.buffer = b""
                self.waiter.set_result(None)

    async def ask(self) -> None:
        """One request and its answer."""
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(self.request)
        await self.waiter


async def load(port: int, callers: int, seconds: float) -> list[float]:
    """Times of requests in order of length."""
    lines = ("POST /v1/decisions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Authorization: Bearer {KEY}", f"Content-Length: {len(BODY)}", "", ""))
    loop, times, end = asyncio.get_running_loop(), [], time.perf_counter() + seconds

    async def caller() -> None:
        _, connection = await loop.create_connection(lambda: Connection(head.encode() + BODY), "127.0.0.1", port)
        while time.perf_counter() < end:
            start = time.perf_counter()
            await connection.ask()
            times.append(time.perf_counter() - start)
        connection.transport.close()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return sorted(times)


def main() -> None:
    """Serve (with an argument of a name) or measure."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    for name in ("uvicorn", "sakuradite"):
        with subprocess.Popen([sys.executable, "-m", __spec__.name, "serve", name], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for callers in (1, 16):
                times = asyncio.run(load(port, callers, seconds))
                p50, p99 = (times[int(len(times) * share)] * 1e6 for share in (0.5, 0.99))
                print(
                    f"{name:11}{callers:3} callers  p50 {p50:7.0f} us  p99 {p99:7.0f} us  {len(times) / seconds:7.0f}/s"
                )
            server.terminate()


def serve(name: str) -> None:
    """Run one of the two applications on a free port and say which."""
    ours = App(ServerConfig(api_key=KEY), ScriptedGateway(at_once), FakeAdministration())
    config = uvicorn.Config(ours if name == "sakuradite" else trivial, log_level="warning", access_log=False)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        main()
