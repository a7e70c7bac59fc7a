"""`/healthz` and `/readyz`, for probes: no key, no content, HEAD too."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from sakuradite.http.exchange import Exchange, Reply
from sakuradite.http.site import Site


class Health(BaseModel):
    """`ok`: this router answers. `ready`: at least one model does. `waiting`: none does yet."""

    status: Literal["ok", "ready", "waiting"]


async def healthz(site: Site, exchange: Exchange) -> Reply:
    """Alive, whatever the models do."""
    return Reply(200, b'{"status":"ok"}')


async def readyz(site: Site, exchange: Exchange) -> Reply:
    """200 when a model is ready, else 503."""
    if site.gateway.resident():
        return Reply(200, b'{"status":"ready"}')
    return Reply(503, b'{"status":"waiting"}', headers=((b"retry-after", b"1"),))
