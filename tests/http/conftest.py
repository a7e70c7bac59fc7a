"""Servers and clients shared by the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.http.serving import MODEL, ScriptedGateway, Served, serve

API_KEY = "sk-test-inference"
ADMIN_KEY = "sk-test-admin"

NOUL = {"type": "noul", "instructions": "It is about money."}
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"a": "first", "b": None, "c": ["x"]}}
SCORE = {"type": "score", "instructions": "How much?", "criteria": ["none", "some", {"label": "all"}]}


def native(questions: Any = None, **changes: Any) -> dict[str, Any]:
    """A native request, or one for System One."""
    body = {
        "model": MODEL,
        "state": "I was charged twice.",
        "questions": {"q": NOUL} if questions is None else questions,
    }
    return body | changes


def openai(**changes: Any) -> dict[str, Any]:
    """A request of the OpenAI dialect."""
    question = {"type": "predicate", "instructions": "It is about money."}
    return {"model": MODEL, "input": "I was charged twice.", "questions": [question]} | changes


@pytest.fixture(scope="session")
def open_server() -> Iterator[Served]:
    """No inference key, an engine with the fake backend."""
    with serve(admin_key=ADMIN_KEY) as served:
        yield served


@pytest.fixture(scope="session")
def keyed_server() -> Iterator[Served]:
    """Both keys set."""
    with serve(api_key=API_KEY, admin_key=ADMIN_KEY) as served:
        yield served


@pytest.fixture
def client(open_server: Served) -> httpx.Client:
    """A client of the server without a key."""
    return open_server.client


@pytest.fixture
def scripted() -> Iterator[Callable[..., Served]]:
    """Make a server over a ScriptedGateway; all are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(script: Any = None, able: dict[str, Any] | None = None, **settings: Any) -> Served:
            arguments = {} if script is None else {"script": script}
            return stack.enter_context(serve(ScriptedGateway(**arguments, **(able or {})), **settings))

        yield make
