"""`/metrics`: the figures of the whole cluster as Prometheus reads them, asked of whoever hosts the application."""

from __future__ import annotations

from sakuradite.errors import NotFoundError
from sakuradite.http.exchange import Exchange, Reply
from sakuradite.http.site import Site

TEXT = b"text/plain; version=0.0.4; charset=utf-8"


async def metrics(site: Site, exchange: Exchange) -> Reply:
    """GET /metrics."""
    if site.metrics is None:
        raise NotFoundError("this server keeps no metrics")
    return Reply(200, await site.metrics(), TEXT)
