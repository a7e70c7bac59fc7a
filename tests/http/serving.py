"""A server to test against: the application under uvicorn in a thread, over gateways that need no cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from sakuradite.config import ModelConfig, ServerConfig
from sakuradite.engine.engine import Engine
from sakuradite.errors import APIError, InvalidLifecycleError, ModelLoadingError, ModelNotFoundError, NotFoundError
from sakuradite.http.app import App
from sakuradite.http.gateway import ResidentModel
from sakuradite.http.protocol import Protocol
from sakuradite.operations import Alias, Inspection, ModelCapabilities, ModelStatus, Operation, Removed
from sakuradite.records import Outcome, RequestRecord, RowAnswer

MODEL = "tiny/fake"
ALIASES = ("jev-latest", "jev-preview", "default")
CREATED = 1_745_712_000


def capabilities(**changes: Any) -> ModelCapabilities:
    """What the models of these tests can do."""
    facts: dict[str, Any] = {
        "architecture": "Fake",
        "backend": "fake",
        "device": "cpu",
        "dtype": "float32",
        "context_length": 1 << 20,
        "max_input_tokens": 8192,
        "max_questions": 400,
    }
    return ModelCapabilities(**(facts | changes))


class EngineGateway:
    """One engine with the fake backend, started in the server's own loop. Names in `loading` are on their way."""

    def __init__(self, model: str = MODEL, **settings: Any) -> None:
        self.config = ModelConfig(model=model, backend="fake", **settings)
        self.engine = Engine(self.config, None)
        self.loading: set[str] = set()
        self.models: list[ResidentModel] = []

    async def start(self) -> None:
        """Load the model; until then nothing is resident."""
        able = await self.engine.start()
        self.models = [ResidentModel(self.config.model.partition("?")[0], CREATED, able, ALIASES)]

    async def stop(self) -> None:
        """Free it."""
        await self.engine.stop(drain=5)

    def resident(self) -> Sequence[ResidentModel]:
        return self.models

    def resolve(self, name: str) -> ResidentModel:
        for model in self.models:
            if name == model.id or name in model.aliases:
                return model
        if name in self.loading:
            raise ModelLoadingError(f"{name} is being loaded", retry_after=3.2)
        raise ModelNotFoundError("no resident model has this name", param="model")

    def decide(self, model: ResidentModel, request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        return self.engine.decide(request)


type Script = Callable[[RequestRecord], AsyncGenerator[list[Outcome]]]


async def evenly(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
    """Every question answered with the same probability for each candidate, one group each."""
    for i in range(len(request.questions)):
        yield [even(request, i)]


def even(request: RequestRecord, row: int) -> RowAnswer:
    """An answer that favours nothing."""
    count = len(request.questions[row].candidates)
    return RowAnswer(row, (1 / count,) * count, 0.9, 10)


class ScriptedGateway(EngineGateway):
    """A model that sees, does as a script says and remembers what it was asked; `ended` counts closed generators."""

    def __init__(self, script: Script = evenly, **changes: Any) -> None:
        self.script = script
        self.requests: list[RequestRecord] = []
        self.produced = 0
        self.ended = 0
        self.loading = set()
        able = capabilities(**({"modalities": ("text", "image")} | changes))
        self.models = [ResidentModel(MODEL, CREATED, able, ALIASES)]

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def decide(self, model: ResidentModel, request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        self.requests.append(request)
        try:
            async for group in self.script(request):
                self.produced += 1
                yield group
        finally:
            self.ended += 1


@dataclass
class FakeAdministration:
    """Remembers calls; raises `error` instead when there is one."""

    error: APIError | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    table: dict[str, str] = field(default_factory=lambda: {"default": MODEL})

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    async def models(self) -> Sequence[ModelStatus]:
        self._note("models")
        return [ModelStatus(model=MODEL, status="ready", capabilities=capabilities(), aliases=ALIASES)]

    async def inspect(self, model: str, revision: str | None, offline: bool) -> Inspection:
        self._note("inspect", model, revision, offline)
        return Inspection(model=model, revision=revision)

    async def pull(self, model: str, revision: str | None, offline: bool) -> Operation:
        self._note("pull", model, revision, offline)
        return Operation(id="op_1", kind="pull", model=model)

    async def load(self, config: ModelConfig) -> Operation:
        self._note("load", config)
        return Operation(id="op_2", kind="load", model=config.model)

    async def unload(self, model: str) -> ModelStatus:
        self._note("unload", model)
        return ModelStatus(model=model, status="unloaded")

    async def remove(self, model: str) -> Removed:
        self._note("remove", model)
        if model == MODEL:
            raise InvalidLifecycleError(f"{model} is loaded; unload it first")
        return Removed(model=model)

    async def operations(self) -> Sequence[Operation]:
        self._note("operations")
        return [Operation(id="op_1", kind="pull", model=MODEL)]

    async def operation(self, operation_id: str) -> Operation:
        self._note("operation", operation_id)
        if operation_id != "op_1":
            raise NotFoundError("no such operation; the latest 256 are kept", param="operation_id")
        return Operation(id="op_1", kind="pull", model=MODEL)

    async def aliases(self) -> Sequence[Alias]:
        self._note("aliases")
        return [Alias(alias=alias, model=model) for alias, model in self.table.items()]

    async def set_alias(self, alias: str, model: str) -> Alias:
        self._note("set_alias", alias, model)
        self.table[alias] = model
        return Alias(alias=alias, model=model)

    async def delete_alias(self, alias: str) -> Alias:
        self._note("delete_alias", alias)
        if alias not in self.table:
            raise NotFoundError("no such alias", param="alias")
        return Alias(alias=alias, model=self.table.pop(alias))


@dataclass
class Served:
    """A running server."""

    url: str
    port: int
    app: App
    gateway: Any
    administration: FakeAdministration
    loop: asyncio.AbstractEventLoop
    client: httpx.Client

    def call[T](self, work: Awaitable[T]) -> T:
        """Run something in the server's loop."""

        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(30)


@contextlib.contextmanager
def serve(
    gateway: EngineGateway | None = None,
    administration: FakeAdministration | None = None,
    http: str | type[Protocol] = Protocol,
    **settings: Any,
) -> Iterator[Served]:
    """A server on a free port of loopback, stopped at the end."""
    gateway = EngineGateway() if gateway is None else gateway
    administration = FakeAdministration() if administration is None else administration
    app = App(ServerConfig(**settings), gateway, administration)
    # proto is named because asyncio sets TCP_NODELAY only where it is: without, each answer waits 40 ms for an ACK
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, http=http, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await gateway.start()
        try:
            await server.serve(sockets=[listener])
        finally:
            await gateway.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < end, "the server did not start in time"
            time.sleep(0.01)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=30) as client:
            yield Served(url, port, app, gateway, administration, loops[0], client)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
