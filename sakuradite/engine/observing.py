"""What can be seen of an engine at work: one account per request, one per batch. The engine itself keeps no figures.

An observer is called on the engine's own threads, once per batch and twice per request, so it must be quick and must
not raise. Nothing that it is given holds a word of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sakuradite.records import RequestRecord


@dataclass(slots=True, eq=False)
class Batch:
    """One forward, as it was planned. Times by `time.monotonic`."""

    started: float
    rows: int
    prompt_tokens: int
    """Whole prompts of all its rows: what a plain forward of each row alone would compute."""
    computed_tokens: int
    """Tokens that it computed, padding included."""
    padding_tokens: int
    seconds: float = 0.0
    """Of the worker thread, until every row had its scores: halves of a batch that did not fit are in it."""

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that did not have to be computed, because rows share their prefix and the head is kept."""
        return self.prompt_tokens - (self.computed_tokens - self.padding_tokens)


@dataclass(slots=True, eq=False)
class Account:
    """One request, from admission to its end. Times by `time.monotonic`, 0 for a step that it did not reach."""

    admitted: float
    compiling: float = 0.0
    compiled: float = 0.0
    input_tokens: int = 0
    batches: list[Batch] = field(default_factory=list)
    ended: float = 0.0
    code: str = ""
    """Of the error that ended it; `cancelled` where the caller went away; empty for a whole answer."""

    @property
    def waited(self) -> float | None:
        """Seconds from admission to its first forward, None without one."""
        return self.batches[0].started - self.admitted if self.batches else None


class Observer(Protocol):
    """Who is told."""

    def compiled(self, requests: int, seconds: float) -> None:
        """On the worker thread: so many requests were compiled together."""

    def forwarded(self, batch: Batch) -> None:
        """On the worker thread: a batch has its scores."""

    def halved(self) -> None:
        """On the worker thread: a batch did not fit the device."""

    def ended(self, request: RequestRecord, account: Account) -> None:
        """On the event loop: a request was answered, failed, was refused, or its caller has gone."""


class Nobody:
    """Sees nothing."""

    def compiled(self, requests: int, seconds: float) -> None: ...
    def forwarded(self, batch: Batch) -> None: ...
    def halved(self) -> None: ...
    def ended(self, request: RequestRecord, account: Account) -> None: ...


NOBODY = Nobody()
