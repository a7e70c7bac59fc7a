"""How many requests, and how many bytes of theirs, one router holds at once over all models."""

from __future__ import annotations

from types import TracebackType

from sakuradite.errors import CapacityExceededError

HELD_BODIES = 16  # bodies of the largest size that may be held at once; small ones are bounded by their number


class Admission:
    """Counts requests and bytes. Past a bound the answer is 429: the caller may come again in a second."""

    def __init__(self, requests: int, body_limit: int) -> None:
        self.max_requests = requests
        self.max_bytes = HELD_BODIES * body_limit
        self.requests = 0
        self.bytes = 0

    def place(self) -> Place:
        """A place for one request, to be used with `with`. Raises CapacityExceededError on entering."""
        return Place(self)


class Place:
    """One admitted request."""

    __slots__ = ("_admission", "_bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._bytes = 0

    def __enter__(self) -> Place:
        if self._admission.requests >= self._admission.max_requests:
            raise CapacityExceededError(
                f"the server already holds {self._admission.max_requests} requests; try again", retry_after=1.0
            )
        self._admission.requests += 1
        return self

    def hold(self, size: int) -> None:
        """Count bytes of the body. Raises CapacityExceededError when the server holds too many."""
        if self._admission.bytes + size > self._admission.max_bytes:
            raise CapacityExceededError(
                f"the server already holds {self._admission.max_bytes} bytes of requests; try again", retry_after=1.0
            )
        self._admission.bytes += size
        self._bytes += size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.requests -= 1
        self._admission.bytes -= self._bytes
