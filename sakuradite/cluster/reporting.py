"""A replica's way to tell how far its download is: to the operation of its load, in the catalog."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sakuradite.cluster.handles import handle_of
from sakuradite.operations import Progress

log = logging.getLogger(__name__)

TOLD = ("downloading", "converting")
"""Not `waiting`: then another replica of the node tells."""


class Reporting:
    """Call it with progress, from any thread. Made inside the event loop that then sends it."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._loop = asyncio.get_running_loop()
        self._catalog: Any = None
        self._sending: set[asyncio.Task[None]] = set()

    def __call__(self, progress: Progress) -> None:
        if progress.phase in TOLD:
            self._loop.call_soon_threadsafe(self._start, progress)

    async def close(self) -> None:
        """The download has ended, one way or the other."""
        if self._catalog is None:  # there was nothing to tell
            return
        self._start(Progress(phase="loading"))
        await asyncio.wait(self._sending, timeout=1)
        await self._catalog.shutdown_async()

    def _start(self, progress: Progress) -> None:
        from sakuradite.cluster.application import CATALOG_DEPLOYMENT, SERVER

        if self._catalog is None:
            self._catalog = handle_of(CATALOG_DEPLOYMENT, SERVER)
        task = self._loop.create_task(self._send(progress))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, progress: Progress) -> None:
        try:
            await self._catalog.report.remote(self._operation, progress)
        except Exception as error:  # the catalog may just be replaced; the download goes on
            log.warning("the catalog does not hear of a download: %s", type(error).__name__)
