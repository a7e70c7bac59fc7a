"""Servers and surroundings shared by the tests of the SDK."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sakuradite import Choice, Noul, Score
from tests.client.raw import RawServer
from tests.http.serving import ScriptedGateway, Served, serve

ADMIN_KEY = "sk-test-admin"
API_KEY = "sk-test-inference"
QUESTIONS: dict[str, Noul | Choice | Score] = {
    "refund": Noul(instructions="The customer asks for a refund."),
    "team": Choice(instructions="Which team?", criteria={"billing": "invoices", "shipping": None}),
    "urgency": Score(criteria=["can wait", "today", "now"]),
}
VARIABLES = ("HOME", "MODEL", "BASE_URL", "API_KEY", "ADMIN_KEY")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no setting of the machine's."""
    for name in (*(f"SAKURADITE_{variable}" for variable in VARIABLES), *PROXIES):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("SAKURADITE_HOME", str(path))
    return path


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """The real application over an engine without weights; no inference key."""
    with serve(admin_key=ADMIN_KEY) as served:
        yield served


@pytest.fixture
def scripted() -> Iterator[Callable[..., Served]]:
    """Make a server whose model does as a script says; all are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(script: Any = None, **settings: Any) -> Served:
            gateway = ScriptedGateway() if script is None else ScriptedGateway(script)
            return stack.enter_context(serve(gateway, **({"admin_key": ADMIN_KEY} | settings)))

        yield make


@pytest.fixture
def raw() -> Iterator[Callable[..., RawServer]]:
    """Make a server that answers with bytes of our choice, at times of our choice."""
    with contextlib.ExitStack() as stack:
        yield lambda *script, **options: stack.enter_context(RawServer(*script, **options))
