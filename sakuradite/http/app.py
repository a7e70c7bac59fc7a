"""The HTTP application: one ASGI callable, no framework. Finds the route, checks the caller, answers or refuses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sakuradite.config import ServerConfig
from sakuradite.errors import APIError, MethodNotAllowedError, NotFoundError
from sakuradite.http import refusals
from sakuradite.http.admission import Admission
from sakuradite.http.auth import Gatekeeper
from sakuradite.http.body import ClientGone, Receive
from sakuradite.http.exchange import Exchange, Reply, Scope, Send
from sakuradite.http.gateway import Administration, Gateway
from sakuradite.http.keys import Keys, without_keys
from sakuradite.http.observing import GONE, GONE_CODE, NOBODY, Observer
from sakuradite.http.routes import ROUTES
from sakuradite.http.site import Route, Site
from sakuradite.http.streaming import abort

DIALECTS = {"/v1/decisions": "native", "/v1/systemone": "systemone"}
"""By path, until the body tells more."""


class App:
    """Serves a gateway over HTTP.

    `keys` are the hashes of the two keys; None takes them from `config`, which is right only where the configuration
    never left the process that read it. `proxied` says that something in front hides the callers' addresses (Serve's
    own proxy); an inference key is then required. `observer` is told of every request, `metrics` makes the text of
    `/metrics`.

    Raises ConfigurationError for a configuration that would be open to others.
    """

    def __init__(
        self,
        config: ServerConfig,
        gateway: Gateway,
        administration: Administration,
        *,
        keys: Keys | None = None,
        proxied: bool = False,
        observer: Observer = NOBODY,
        metrics: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        keys = Keys.of(config) if keys is None else keys
        config = without_keys(config)
        self.gatekeeper = Gatekeeper(config, keys, proxied)
        self.site = Site(
            config=config,
            gateway=gateway,
            administration=administration,
            routes=ROUTES,
            admission=Admission(config.max_pending_requests, config.max_request_bytes),
            keyed=keys.inference is not None,
            metrics=metrics,
        )
        self.observer = observer
        self.table = Table(ROUTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._answer(Exchange(scope, receive, send))
            case "lifespan":
                await _live(receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1003})

    async def _answer(self, exchange: Exchange) -> None:
        """Answer, and tell the observer of it."""
        account = exchange.account
        account.dialect = DIALECTS.get(exchange.path, "admin" if exchange.path.startswith("/admin/") else "other")
        self.observer.began(exchange)
        account.status = GONE  # what it stays where the server gives up on the connection
        account.code = GONE_CODE
        try:
            await self._reply(exchange)
        finally:
            account.seconds = time.perf_counter() - exchange.started
            self.observer.ended(exchange)

    async def _reply(self, exchange: Exchange) -> None:
        refuse = refusals.system_one if exchange.path == "/v1/systemone" else refusals.native
        account = exchange.account
        reply: Reply | None
        code = ""
        try:
            route = self.table.find(exchange)
            account.route = route.path
            self.gatekeeper.admit(exchange, route.access)
            reply = await route.handler(self.site, exchange)
        except ClientGone:
            return
        except MethodNotAllowedError as error:
            reply, code = refuse(error), error.code
            allow = ", ".join(self.table.methods(exchange.path)).encode()
            reply = Reply(reply.status, reply.body, headers=(*reply.headers, (b"allow", allow)))
        except APIError as error:
            reply, code = refuse(error), error.code
        except Exception as error:
            found = refusals.unexpected(error, exchange.id)
            reply, code = refuse(found), found.code
        if reply is not None:
            if exchange.status:  # too late to refuse: what was sent must not look complete
                account.status, account.code = exchange.status, code
                abort(exchange.send)
                return
            await exchange.reply(reply)
            account.code = code
        elif account.code == GONE_CODE:  # a stream that ended with an error has said so
            account.code = ""
        account.status = exchange.status


class Table:
    """Routes by path and method. A path is taken as it is: no redirect, no alias with a slash at the end."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.exact: dict[str, dict[str, Route]] = {}
        self.prefixed: dict[str, tuple[str, dict[str, Route]]] = {}
        for route in routes:
            prefix, brace, name = route.path.partition("{")
            if brace:
                methods = self.prefixed.setdefault(prefix, (name.rstrip("}"), {}))[1]
            else:
                methods = self.exact.setdefault(route.path, {})
            methods[route.method] = route
            if route.head:
                methods["HEAD"] = route

    def find(self, exchange: Exchange) -> Route:
        """The route of a request, its parameters noted. Raises NotFoundError or MethodNotAllowedError."""
        methods = self._at(exchange.path, exchange.parameters)
        if methods is None:
            raise NotFoundError("no such route; /docs lists them")
        if (route := methods.get(exchange.method)) is None:
            raise MethodNotAllowedError(f"this route takes {', '.join(sorted(methods))}")
        return route

    def methods(self, path: str) -> list[str]:
        """The methods of a path, for `Allow`."""
        return sorted(self._at(path, {}) or ())

    def _at(self, path: str, parameters: dict[str, str]) -> dict[str, Route] | None:
        if (methods := self.exact.get(path)) is not None:
            return methods
        prefix, slash, last = path.rpartition("/")
        if last and (found := self.prefixed.get(prefix + slash)) is not None:
            name, methods = found
            parameters[name] = last
            return methods
        return None


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message: dict[str, Any] = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
