"""Callers over HTTP that cost little themselves: a keep-alive connection each, one request after another.

    python -m tests.benchmarks.overhead.load PORT CALLERS SECONDS KEY kind        (kind: unary, stream or plain)

Prints a JSON line: requests per second, the median in milliseconds, requests in all.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

import orjson

QUESTIONS = 4
MODEL = "fake"


def body(stream: bool) -> bytes:
    """1.1 KB: a state and four choices."""
    question = {"type": "choice", "instructions": "y" * 100, "criteria": {"a": "one", "b": "two"}}
    questions = {f"q{i}": question for i in range(QUESTIONS)}
    return orjson.dumps(
        {"model": MODEL, "state": "x" * 300, "questions": questions} | ({"stream": True} if stream else {})
    )


class Caller(asyncio.Protocol):
    """One connection. `end` finds the end of a response."""

    def __init__(self, stream: bool) -> None:
        self.stream = stream
        self.buffer = b""
        self.answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self._complete():
            if not self.buffer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(self.buffer[:1000].decode())
            self.buffer = b""
            assert self.answered is not None
            self.answered.set_result(None)

    def _complete(self) -> bool:
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return False
        at = self.buffer.lower().find(b"content-length:", 0, head)
        if at < 0:
            return self.buffer.endswith(b"0\r\n\r\n")
        return len(self.buffer) >= head + 4 + int(self.buffer[at + 15 : self.buffer.find(b"\r", at)])

    async def ask(self, raw: bytes) -> None:
        self.answered = asyncio.get_running_loop().create_future()
        self.transport.write(raw)
        await self.answered


async def load(port: int, callers: int, seconds: float, key: str, kind: str) -> dict[str, float]:
    """Requests per second and the median time, after a warm-up of a fifth of the time; requests in all."""
    content = body(kind == "stream")
    raw = (
        b"POST /v1/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (key.encode(), len(content))
    ) + content
    loop = asyncio.get_running_loop()
    begin = time.perf_counter() + seconds / 5
    end = begin + seconds
    times: list[float] = []
    answered = 0

    async def one() -> None:
        nonlocal answered
        _, caller = await loop.create_connection(lambda: Caller(kind == "stream"), "127.0.0.1", port)
        while (start := time.perf_counter()) < end:
            await caller.ask(raw)
            answered += 1
            if start >= begin:
                times.append(time.perf_counter() - start)
        caller.transport.close()

    await asyncio.gather(*(one() for _ in range(callers)))
    return {"per_second": len(times) / seconds, "p50_ms": statistics.median(times) * 1e3, "answered": answered}


if __name__ == "__main__":
    port, callers, seconds, key, kind = sys.argv[1:]
    print(json.dumps(asyncio.run(load(int(port), int(callers), float(seconds), key, kind))))
