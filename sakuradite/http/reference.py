"""The two pages of the API reference, rendered once per application."""

from __future__ import annotations

import orjson

from sakuradite.http.exchange import HTML, Exchange, Reply
from sakuradite.http.openapi import document
from sakuradite.http.page import page
from sakuradite.http.site import Site

# Nothing may be fetched or run by the page, whatever gets into it.
POLICY = (
    b"content-security-policy",
    b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
)


async def openapi(site: Site, exchange: Exchange) -> Reply:
    """GET /openapi.json."""
    if "openapi" not in site.pages:
        site.pages["openapi"] = orjson.dumps(document(site.routes, site.keyed), option=orjson.OPT_INDENT_2)
    return Reply(200, site.pages["openapi"])


async def docs(site: Site, exchange: Exchange) -> Reply:
    """GET /docs."""
    if "docs" not in site.pages:
        site.pages["docs"] = page(site.routes, document(site.routes, site.keyed)).encode()
    return Reply(200, site.pages["docs"], HTML, (POLICY,))
