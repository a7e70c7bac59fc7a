"""A slow network between a client and a server: a proxy that passes so many bytes a second, each block late."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

BLOCK = 1024


class SlowNetwork:
    """`url` leads to the port, at `rate` bytes a second each way and connection, every block `delay` seconds late."""

    def __init__(self, port: int, rate: float, delay: float) -> None:
        self._port, self._rate, self._delay = port, rate, delay
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def __enter__(self) -> SlowNetwork:
        self._thread.start()
        starting = asyncio.start_server(self._pass_on, "127.0.0.1", 0, limit=2 * BLOCK)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def stop() -> None:
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.05)  # for the closed connections to go

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port, limit=2 * BLOCK)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the end of this network
                await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        finally:
            writer.close()
            back.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(BLOCK):
                await asyncio.sleep(self._delay + len(data) / self._rate)
                target.write(data)
                await target.drain()
        target.close()
