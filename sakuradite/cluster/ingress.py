"""The HTTP application behind Serve's own proxy: for Kubernetes, where that proxy and its health routes are the custom.

Callers' addresses are the proxy's, so an inference key is required; it comes from this process's environment.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from sakuradite.cluster.router import Front
from sakuradite.config import ServerConfig, server_settings
from sakuradite.http.keys import Keys


class _Application:
    """An ASGI callable that exists before the event loop does: Serve asks for it while the replica is made."""

    def __init__(self) -> None:
        self.front: Front | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert self.front is not None
        await self.front.application(scope, receive, send)


@serve.ingress()
class Ingress:
    """The router as a Serve ingress."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], catalog: Any, *models: Any
    ) -> None:
        """`models` are handles that are not used: they bring models into this application."""
        config = ServerConfig.model_validate(settings)
        keys = Keys.of(server_settings(config.home))
        self._application = _Application()
        self._application.front = Front(config, keys, catalog, proxied=True)
        await self._application.front.ready()

    def __serve_build_asgi_app__(self) -> _Application:
        return self._application

    async def figures(self) -> Any:
        """What this router counted, for `/metrics`."""
        assert self._application.front is not None
        return self._application.front.figures()

    async def check_health(self) -> None:
        """Raises when this router no longer hears of changes."""
        assert self._application.front is not None
        self._application.front.check()

    async def __del__(self) -> None:
        if getattr(self, "_application", None) is not None and self._application.front is not None:
            await self._application.front.close()
