"""What can be seen of the HTTP application at work: an account per request, for counts, log lines and traces.

An observer is called on the event loop, must be quick and must not raise. It may look at an exchange's method, its
`account` and its `traceparent` header; nothing of the body reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sakuradite.http.exchange import Exchange

GONE = 499
"""The status of a request whose caller went away before its answer was whole: nothing was sent, so it is ours to name.
nginx calls it so too."""
GONE_CODE = "caller_gone"


@dataclass(slots=True)
class Account:
    """One request as far as it got. `model` is that of a resident model, never a name that somebody sent."""

    dialect: str = "other"
    """native, openai or systemone; admin or other for the rest."""
    route: str = "-"
    """The path as declared; a dash where there is no such route, because a path may say anything."""
    model: str = ""
    questions: int = 0
    images: int = 0
    input_tokens: int = 0
    stream: bool = False
    code: str = ""
    """Of the error it was answered with; empty for none."""
    status: int = 0
    seconds: float = 0.0
    first: float = 0.0
    """Seconds to the first byte of the answer."""
    trace: str = ""
    """The span that work below belongs to, as a W3C `traceparent`; the observer puts it here."""


class Observer(Protocol):
    """Who is told."""

    def began(self, exchange: Exchange) -> None:
        """A request has come; its headers are read, its body is not."""

    def ended(self, exchange: Exchange) -> None:
        """It was answered, or its caller has gone. Its account is complete."""


class Nobody:
    """Sees nothing."""

    def began(self, exchange: Exchange) -> None: ...
    def ended(self, exchange: Exchange) -> None: ...


NOBODY = Nobody()
