"""What every handler can reach: the settings, the two seams to the cluster, and the counts of one router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sakuradite.config import ServerConfig
from sakuradite.errors import APIError
from sakuradite.http import refusals
from sakuradite.http.admission import Admission
from sakuradite.http.auth import Access
from sakuradite.http.exchange import Exchange, Reply
from sakuradite.http.gateway import Administration, Gateway

type Handler = Callable[[Site, Exchange], Awaitable[Reply | None]]
"""Answers a request; None when it has already sent its response."""

type Method = Literal["GET", "POST", "PUT", "DELETE"]


@dataclass(frozen=True, slots=True)
class Example:
    """A request that works as it stands, and what comes back. `model` in it is a stand-in for a resident model."""

    name: str
    summary: str
    request: dict[str, Any] | None
    response: Any
    dialect: str = ""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path or the query."""

    name: str
    place: Literal["path", "query"]
    description: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """One successful response."""

    status: int
    description: str
    schema: Any
    media_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint, declared once: the server, `/openapi.json` and `/docs` read the same."""

    method: Method
    path: str
    operation_id: str
    tag: str
    summary: str
    description: str
    access: Access
    handler: Handler
    answers: tuple[Answer, ...]
    requests: tuple[tuple[str, Any], ...] = ()
    """Media types of the body with their schemas."""
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[str, ...] = ()
    """Codes of the contract that this endpoint answers with, besides those of access."""
    examples: tuple[Example, ...] = ()
    head: bool = False
    refuse: Callable[[APIError], Reply] = refusals.native


@dataclass(slots=True)
class Site:
    """One application's parts."""

    config: ServerConfig
    gateway: Gateway
    administration: Administration
    routes: Sequence[Route]
    admission: Admission
    keyed: bool
    """Whether an inference key is asked for."""
    metrics: Callable[[], Awaitable[bytes]] | None = None
    """Makes the text of `/metrics`; None where nobody counts."""
    pages: dict[str, bytes] = field(default_factory=dict)
    """The reference, rendered once."""
