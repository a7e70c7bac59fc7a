"""Where a client's work runs: one event loop, the caller's own or one in a thread of the client's.

Callers reach it from any thread and from any other loop; what runs there (`session`) never needs a lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from sakuradite.errors import ClosedError

CLOSED = "this client is closed; a closed client cannot be reopened, make a new one"


class Loop:
    """An event loop that a client's coroutines run in.

    `Loop()` starts a thread with a loop of its own; `Loop(asyncio.get_running_loop())` uses the caller's, which costs
    no switch between threads for calls from that loop.
    """

    def __init__(self, running: asyncio.AbstractEventLoop | None = None) -> None:
        self._thread: threading.Thread | None = None
        self.loop = running or asyncio.new_event_loop()
        if running is None:
            self._thread = threading.Thread(target=self._run, name="sakuradite-client", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._end())
            self.loop.close()

    async def _end(self) -> None:
        """Cancel what no caller waits for any more, as after Ctrl-C."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.loop.shutdown_asyncgens()

    @property
    def ended(self) -> bool:
        """Whether nothing can run here any more."""
        return self.loop.is_closed()

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine from another thread."""
        if self.ended:
            coroutine.close()
            raise ClosedError(CLOSED if self._thread else "the event loop that this client was opened in has ended")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, for synchronous callers. An interrupted wait (Ctrl-C) cancels the coroutine."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, for a caller in any loop. Cancelling the caller cancels the coroutine."""
        if asyncio.get_running_loop() is self.loop:
            return await coroutine
        return await asyncio.wrap_future(self.submit(coroutine))

    def stop(self) -> None:
        """End the thread, if there is one. Safe to call twice, and from any thread but this loop's own."""
        if self._thread is None:
            return
        if not self.ended:
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop this code runs in, None in synchronous code."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
