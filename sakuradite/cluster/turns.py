"""Who is computed in a replica: requests together as they come, or one alone, so that its death tells who it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """Entered in the order of asking: who wants to be alone waits for those inside, who comes later for that one."""

    def __init__(self) -> None:
        self._entrance = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def together(self) -> AsyncGenerator[None]:
        """Be inside with others."""
        async with self._entrance:
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None]:
        """Be inside with nobody else."""
        async with self._entrance:
            await self._empty.wait()
            yield
