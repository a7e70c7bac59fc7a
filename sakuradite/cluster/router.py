"""The router: the HTTP application in a Serve replica that runs uvicorn itself.

Serve's own proxies give no flow control and listen where they like; here a reader that stops reading stops the
producer, a loopback bind is strict, and a request takes one hop less. `Ingress` is the same application behind Serve's
proxy, for Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any

from sakuradite.cluster.administration import RemoteAdministration
from sakuradite.cluster.gateway import ServeGateway
from sakuradite.cluster.gathering import gather, text
from sakuradite.cluster.handles import handle_of
from sakuradite.cluster.observers import RouterObserver
from sakuradite.cluster.seeing import Seeing
from sakuradite.config import ServerConfig, log_settings
from sakuradite.http.keys import Keys

if TYPE_CHECKING:
    from sakuradite.cluster.gathering import Figures

log = logging.getLogger(__name__)

FIRST_TABLE_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 75
"""Longer than the clients' pools keep an idle connection, so that it is they who close it."""
BACKLOG = 2048


class Front:
    """The HTTP application with what it needs of the cluster. Belongs to the event loop it is made in."""

    def __init__(self, config: ServerConfig, keys: Keys, catalog: Any, proxied: bool) -> None:
        from sakuradite.http.app import App

        catalog._init(_run_router_in_separate_loop=False)
        self._catalog, self._routers = catalog, _own_deployment()
        self._seeing = Seeing("router", log_settings(config.log_format, config.log_level, config.log_dir))
        meters = self._seeing.meters
        self._observer = RouterObserver(meters, self._seeing.tracing, self._seeing.lines)
        self.gateway = ServeGateway(catalog, meters["sakuradite_retries_total"])
        self.application = App(
            config,
            self.gateway,
            RemoteAdministration(catalog),
            keys=keys,
            proxied=proxied,
            observer=self._observer,
            metrics=self._metrics,
        )
        meters.refresh(self._look)
        self._following = asyncio.ensure_future(self.gateway.follow())

    def figures(self) -> Figures:
        """What this router counted."""
        return self._seeing.figures()

    async def _metrics(self) -> bytes:
        """The figures of the whole cluster."""
        handles = {"the routers": self._routers, "the catalog": self._catalog, **self.gateway.handles()}
        return text(await gather(handles))

    def _look(self) -> None:
        meters, admission = self._seeing.meters, self.application.site.admission
        meters["sakuradite_requests_in_flight"].set(admission.requests)
        meters["sakuradite_request_bytes_in_flight"].set(admission.bytes)
        calls = meters["sakuradite_calls_in_flight"]
        calls.clear()
        for model, number in self.gateway.calls_in_flight().items():
            calls.labels(model).set(number)
            self._observer.expect(model)

    async def ready(self) -> None:
        """Return when the first table of models is here."""
        async with asyncio.timeout(FIRST_TABLE_SECONDS):
            await self.gateway.followed.wait()

    def check(self) -> None:
        """Raises when the table is no longer followed."""
        if self._following.done():
            raise RuntimeError("the router no longer follows the catalog")

    async def close(self) -> None:
        """Follow and tell no more."""
        self._following.cancel()
        await self._seeing.close()


def _own_deployment() -> Any:
    """A handle to this replica and its like."""
    from ray import serve

    context = serve.get_replica_context()
    return handle_of(context.deployment, context.app_name)


class Router:
    """The Serve deployment of `sakuradite serve`. Several of one node share the port."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], keys: Keys, catalog: Any
    ) -> None:
        self._config = ServerConfig.model_validate(settings)
        self._front = Front(self._config, keys, catalog, proxied=False)
        await self._front.ready()
        self._socket = listen(self._config.host, self._config.port)
        self._server = _server(self._front.application, self._config.drain_timeout)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))

    async def address(self) -> tuple[str, int]:
        """Where it listens: the host as configured and the port that it got."""
        return self._config.host, self._socket.getsockname()[1]

    async def figures(self) -> Figures:
        """What this router counted, for `/metrics`."""
        return self._front.figures()

    async def drain(self) -> None:
        """Accept no more connections; return when running requests are answered, or after the drain time."""
        self._server.should_exit = True
        with contextlib.suppress(Exception):
            await asyncio.shield(self._serving)

    async def check_health(self) -> None:
        """Raises when this router no longer listens or no longer hears of changes."""
        self._front.check()
        if self._serving.done() and not self._server.should_exit:
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_serving"):
            await self.drain()
            await self._front.close()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that other routers of this machine may share. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # proto is named because asyncio sets TCP_NODELAY only where it is: without, answers wait 40 ms for an ACK
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _server(application: Any, drain: float) -> Any:
    import uvicorn

    from sakuradite.http.protocol import Protocol

    config = uvicorn.Config(
        application,
        http=Protocol,
        loop="none",
        lifespan="off",
        log_config=None,  # uvicorn's own closes Serve's handlers, and a new controller then throws this replica away
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=True,
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(drain)),
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    return server
