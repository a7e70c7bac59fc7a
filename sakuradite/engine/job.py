"""A request inside the engine, from admission to its last outcome: shared by the event loop and the worker thread.

The loop owns the fields of the first half, the worker those of the second; `gone` is set by either and only ever
turns true.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sakuradite.engine.backend import Prefix
from sakuradite.engine.batching import Work
from sakuradite.engine.observing import Account
from sakuradite.errors import APIError
from sakuradite.records import Outcome, RequestRecord


@dataclass(slots=True, eq=False)
class Job(Work):
    """One admitted request."""

    request: RequestRecord = field(default_factory=lambda: RequestRecord("", (), ()))
    size: int = 0
    """Bytes it counts for in admission."""
    awaited: int = 0
    """Questions whose outcome the loop has not seen."""
    groups: list[Outcome] = field(default_factory=list)
    """Outcomes that have come and were not yet handed on."""
    waiter: asyncio.Future[None] | None = None
    error: APIError | None = None
    finished: bool = False
    timer: asyncio.TimerHandle | None = None

    account: Account = field(default_factory=lambda: Account(0.0))
    """For the observer; the worker writes into it until it has posted the last outcome."""

    unanswered: int = 0
    """Compiled questions that the worker has not read out."""
    tokens: int = 0
    """Prompt tokens compiled for it and not yet answered."""
    pixels: int = 0
    """Bytes of its prepared images."""
    prefixes: list[Prefix] = field(default_factory=list)

    def wake(self) -> None:
        """Let the consumer look again."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
