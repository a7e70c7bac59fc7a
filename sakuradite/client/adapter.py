"""A synchronous httpx.Client of the caller, used from coroutines: each of its blocking steps runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import httpx

THREADS = 64  # requests of one such client that may be under way at once
ENCODED = {"content-encoding", "content-length", "transfer-encoding"}  # headers of the bytes before decoding


class ThreadedTransport(httpx.AsyncBaseTransport):
    """Sends through an httpx.Client, with all it was set up with: proxies, certificates, hooks, a mock transport."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sakuradite-http")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        copy = self._client.build_request(
            request.method,
            request.url,
            headers=request.headers,
            content=await request.aread(),
            extensions=request.extensions,
        )
        loop = asyncio.get_running_loop()
        response = await loop.run_in_executor(self._threads, lambda: self._client.send(copy, stream=True))
        headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in ENCODED]
        return httpx.Response(
            response.status_code,
            headers=headers,
            stream=_ThreadedBody(response, self._threads),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _ThreadedBody(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, threads: ThreadPoolExecutor) -> None:
        self._response, self._threads = response, threads

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        chunks = self._response.iter_bytes()
        while (chunk := await loop.run_in_executor(self._threads, next, chunks, None)) is not None:
            yield chunk

    async def aclose(self) -> None:
        self._response.close()
