"""`Sakuradite`: one class for embedded use and HTTP, for synchronous code and coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx
from pydantic import ValidationError as PydanticValidationError

from sakuradite.client.describe import EMBEDDED_ONLY, Description
from sakuradite.client.embedded import EmbeddedTransport
from sakuradite.client.faces import AsyncClient, SyncClient, no_model
from sakuradite.client.http import HTTPTransport, checked_base_url
from sakuradite.client.loop import Loop, running_loop
from sakuradite.client.many import DEFAULT_CONCURRENCY
from sakuradite.client.request import Image, State
from sakuradite.client.session import Session
from sakuradite.client.transport import Transport
from sakuradite.config import BackendName, ClientSettings, ModelConfig, client_settings
from sakuradite.errors import ConfigurationError
from sakuradite.questions import Questions


class Sakuradite:
    """Typed decisions from a model in this process's local Ray, or from a daemon over HTTP.

    >>> with Sakuradite("Qwen/Qwen3-0.6B") as client:  # methods return values
    ...     result = client.decide(state="…", questions={"refund": Noul(instructions="Asks for a refund.")})
    >>> async with Sakuradite(base_url="http://127.0.0.1:7777") as client:  # methods are coroutines
    ...     result = await client.decide(…)

    `open()` and `await aopen()` give the same clients without a context. The bare object works too and follows its
    surroundings: inside a running event loop its methods give awaitables, elsewhere values; its type is then `Any`.

    Each setting is the argument, else the environment (SAKURADITE_MODEL, _BASE_URL, _API_KEY, _ADMIN_KEY, _HOME), else
    config.toml in the home, else a default. With a base URL the client speaks HTTP, without one it is embedded;
    `base_url=""` says embedded whatever the environment has. `describe()` tells what was chosen and why.

    - `model`: a hub id or a checkpoint's path, or (embedded) a ModelConfig; over HTTP the id of a loaded model.
    - `revision`, `backend`, `device`, `dtype`, `offline`: how an embedded model is loaded.
    - `timeout`: seconds for one decision; None: the model's own deadline.
    - `retries`: how often a decision is asked again after a 429 or 503 that may pass, heeding Retry-After. A connection
      that could not be made is always tried 3 times, a decision whose connection broke is sent once more (it is the
      same decision, and another router may be there); streams are never sent twice.
    - `http_client`: an httpx.Client (for `with`) or httpx.AsyncClient (for `async with`) of yours; you close it.

    Raises ConfigurationError for settings that contradict each other.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        revision: str | None = None,
        backend: BackendName | None = None,
        device: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None,
        offline: bool | None = None,
        timeout: float | None = None,
        retries: int = 0,
        home: Path | str | None = None,
        http_client: httpx.Client | httpx.AsyncClient | None = None,
    ) -> None:
        self._config = model if isinstance(model, ModelConfig) else None
        loading = {"revision": revision, "backend": backend, "device": device, "dtype": dtype, "offline": offline}
        given = [name for name, value in loading.items() if value is not None]
        if self._config is not None:
            if given:
                raise ConfigurationError(f"{given[0]}= is given twice: it is part of the ModelConfig")
            loading |= {name: getattr(self._config, name) for name in EMBEDDED_ONLY}
        if http_client is not None and base_url is None and (url := str(http_client.base_url)):
            base_url = url
        self._settings = client_settings(
            home,
            model=self._config.model if self._config else None if model is None else str(model),
            base_url=base_url,
            api_key=api_key,
            admin_key=admin_key,
            timeout=timeout,
            **loading,
        )
        self._http_client = http_client
        self._check(given or (["model=ModelConfig(…)"] if self._config else []), retries)
        self._retries = retries
        self._lock = threading.Lock()
        self._faces: tuple[SyncClient, AsyncClient] | None = None

    def _check(self, loading: Sequence[str], retries: int) -> None:
        """Refuse settings that contradict each other."""
        settings = self._settings
        if retries < 0:
            raise ConfigurationError(f"retries must not be negative, it is {retries}")
        if settings.base_url:
            checked_base_url(settings.base_url)
            if loading:
                where = settings.origin["base_url"]
                how = "leave out base_url=" if where == "argument" else 'unset it there, or pass base_url=""'
                raise ConfigurationError(
                    f"{loading[0]}{'' if '=' in loading[0] else '='} is about embedded use, but base_url is "
                    f"{settings.base_url} ({where}), where the daemon has the model. To be embedded, {how}"
                )
        if self._http_client is not None and not settings.base_url:
            raise ConfigurationError("http_client= needs a base URL: pass base_url=… too, or set it on the client")

    def describe(self) -> Description:
        """Where this client runs, and which setting made it so. Nothing is opened for it."""
        return Description.of(self._settings)

    # Opening and closing

    def open(self) -> SyncClient:
        """The client with methods that return values, ready to answer. Close it when done."""
        if running_loop() is not None:
            raise ConfigurationError(
                "`with Sakuradite(…)` and `open()` would block the running event loop: "
                "use `async with Sakuradite(…) as client` or `await aopen()`, and await the client's methods"
            )
        client = self._started(None)[0]
        try:
            client._loop.wait(client._session.open())
        except BaseException:
            client.close()
            raise
        return client

    async def aopen(self) -> AsyncClient:
        """The client with coroutine methods, ready to answer, working in the running event loop. Close it when done."""
        client = self._started(asyncio.get_running_loop())[1]
        try:
            await client._loop.run(client._session.open())
        except BaseException:
            await client.close()
            raise
        return client

    def __enter__(self) -> SyncClient:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started(None)[0].close()

    async def __aenter__(self) -> AsyncClient:
        return await self.aopen()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._started(None)[1].close()

    def _started(self, loop: asyncio.AbstractEventLoop | None) -> tuple[SyncClient, AsyncClient]:
        """Both faces of this client. The first call decides where it works: in `loop`, or in a thread of its own."""
        with self._lock:
            if self._faces is None:
                if loop is None and isinstance(self._http_client, httpx.AsyncClient):
                    raise ConfigurationError(
                        "http_client is an httpx.AsyncClient, which belongs to one event loop: "
                        "use `async with Sakuradite(…)` or `await aopen()`, or pass an httpx.Client"
                    )
                session = Session(self._transport, self._retries)
                work = Loop(loop)
                self._faces = SyncClient(self._settings, session, work), AsyncClient(self._settings, session, work)
            return self._faces

    def _transport(self) -> Transport:
        settings = self._settings
        if settings.base_url:
            return HTTPTransport(settings, self._http_client)
        if self._config is None and settings.model is None:
            raise ConfigurationError(
                no_model(settings) + "; or, for a daemon, pass base_url=… or set SAKURADITE_BASE_URL"
            )
        return EmbeddedTransport(self._config or model_config(settings), settings.home)

    # The bare object

    def _face(self) -> SyncClient | AsyncClient:
        sync, coroutines = self._started(None)
        return sync if running_loop() is None else coroutines

    @property
    def models(self) -> Any:
        """`SyncClient.models` or, in a running event loop, `AsyncClient.models`."""
        return self._face().models

    @property
    def closed(self) -> bool:
        """Whether this client was closed. A closed one cannot be reopened."""
        return self._faces is not None and self._faces[0].closed

    def decide(
        self,
        state: State,
        questions: Questions,
        *,
        images: Sequence[Image] = (),
        stream: bool = False,
        timeout: float | None = None,
        model: str | None = None,
    ) -> Any:
        """`SyncClient.decide` or, in a running event loop, `AsyncClient.decide`."""
        return self._face().decide(state, questions, images=images, stream=stream, timeout=timeout, model=model)

    def decide_many(
        self,
        states: Iterable[State] | AsyncIterable[State],
        questions: Questions,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        timeout: float | None = None,
        model: str | None = None,
    ) -> Any:
        """`SyncClient.decide_many` or, in a running event loop, `AsyncClient.decide_many`."""
        face: Any = self._face()
        return face.decide_many(states, questions, concurrency=concurrency, timeout=timeout, model=model)

    def close(self) -> Any:
        """Close the client; in a running event loop the closing has begun on return, and can be awaited."""
        face = self._face()
        if isinstance(face, AsyncClient):
            return asyncio.ensure_future(face.close())
        return face.close()


def model_config(settings: ClientSettings) -> ModelConfig:
    """What an embedded client loads. Raises ConfigurationError for a value that no model can have."""
    values = {name: getattr(settings, name) for name in ("model", *EMBEDDED_ONLY)}
    try:
        return ModelConfig.model_validate(values)
    except PydanticValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = str(first["loc"][0])
        raise ConfigurationError(f"{name} ({settings.origin[name]}): {first['msg']}", param=name) from None
