"""Commands run in this process, against the real application over an engine without weights."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from sakuradite.cli.exits import run
from sakuradite.config import ModelConfig
from sakuradite.operations import Inspection, ModelStatus, Operation, OperationError, Progress, StorageStatus
from tests.client.conftest import PROXIES, VARIABLES
from tests.http.serving import MODEL, EngineGateway, FakeAdministration, Served, capabilities, serve

ADMIN_KEY = "sk-test-admin"
QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "The customer asks for a refund."},
    "team": {"type": "choice", "criteria": {"billing": "invoices", "shipping": None}},
    "urgency": {"type": "score", "criteria": ["can wait", "today", "now"]},
}


@dataclass
class Daemon(FakeAdministration):
    """An administration whose operations get on each time they are looked at, and end as `ends` says."""

    ends: OperationError | None = None
    steps: list[Progress] = field(
        default_factory=lambda: [
            Progress(phase="downloading", bytes_done=done * 1_000_000, bytes_total=4_000_000) for done in (1, 2, 4)
        ]
    )
    looked: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    async def models(self) -> list[ModelStatus]:
        self._note("models")
        (ready,) = await super().models()
        ready = ready.model_copy(update={"capabilities": capabilities(**self.found)})
        stored = StorageStatus(managed=True, bytes=273_000_000, revision="0123456789abcdef")
        return [ready, ModelStatus(model="org/stored", status="unloaded", storage=stored)]

    async def inspect(self, model: str, revision: str | None, offline: bool) -> Inspection:
        self._note("inspect", model, revision, offline)
        return Inspection(model=model, revision=revision, architecture="Qwen3ForCausalLM", parameters=596_049_920)

    async def load(self, config: ModelConfig) -> Operation:
        self.looked = 0
        return await super().load(config)

    async def pull(self, model: str, revision: str | None, offline: bool) -> Operation:
        self.looked = 0
        return await super().pull(model, revision, offline)

    async def operation(self, operation_id: str) -> Operation:
        self._note("operation", operation_id)
        progress = self.steps[min(self.looked, len(self.steps) - 1)]
        self.looked += 1
        fields: dict[str, Any] = {"id": operation_id, "kind": "load", "model": MODEL, "progress": progress}
        if self.looked <= len(self.steps):
            return Operation(status="running", **fields)
        return Operation(status="failed" if self.ends else "succeeded", error=self.ends, **fields)


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The whole of stdout as JSON."""
        return orjson.loads(self.out)


type Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def session_daemon() -> Iterator[Served]:
    """One server for all tests."""
    with serve(EngineGateway(), Daemon(), admin_key=ADMIN_KEY) as served:
        yield served


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no setting of the machine's."""
    for name in (*(f"SAKURADITE_{variable}" for variable in VARIABLES), *PROXIES, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    path = tmp_path / "home"
    monkeypatch.setenv("SAKURADITE_HOME", str(path))
    return path


@pytest.fixture
def daemon(session_daemon: Served, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """The daemon that commands speak to, and what it was asked."""
    monkeypatch.setenv("SAKURADITE_BASE_URL", session_daemon.url)
    monkeypatch.setenv("SAKURADITE_ADMIN_KEY", ADMIN_KEY)
    administration = session_daemon.administration
    assert isinstance(administration, Daemon)
    administration.calls.clear()
    administration.ends = administration.error = None
    return administration


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("ps", "--json")` runs a command; `stdin` is piped into it."""

    def command(*arguments: object, stdin: str | bytes = b"") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return command


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A file of three questions."""
    path = tmp_path / "questions.json"
    path.write_bytes(orjson.dumps(QUESTIONS))
    return path
