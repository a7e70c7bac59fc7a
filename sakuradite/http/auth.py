"""Who may speak to this server: the two keys, and the rules for a server that has no inference key."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Literal
from urllib.parse import urlsplit

from sakuradite.config import ServerConfig
from sakuradite.errors import ConfigurationError, ForbiddenError, UnauthorizedError
from sakuradite.http.exchange import Exchange
from sakuradite.http.keys import Keys

type Access = Literal["open", "inference", "admin"]


def is_loopback(host: str) -> bool:
    """Whether a host name or address (no port) means this machine."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def host_of(authority: str) -> str:
    """The host of `host:port`, lower case, without brackets; empty when it cannot be read."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


class Gatekeeper:
    """The access rules of one server.

    With an inference key: that key opens inference and the reference pages. Without: only callers on this machine, who
    name this machine in `Host` and come from no other origin. The admin key opens `/admin` and nothing else. Where
    `allowed_hosts` is set, `Host` is checked in either case.

    Raises ConfigurationError for a server that would be open to others: no key, and bound beyond loopback or hosted
    behind a proxy (`proxied`) that hides the caller's address.
    """

    def __init__(self, config: ServerConfig, keys: Keys, proxied: bool = False) -> None:
        if keys.inference is None and proxied:
            raise ConfigurationError(
                "behind a proxy that hides its callers an inference key is required: set SAKURADITE_API_KEY in the "
                "environment of the router's process (on Ray: of every node)",
                param="api_key",
            )
        if keys.inference is None and not is_loopback(config.host):
            raise ConfigurationError(
                f"serving on {config.host} needs an inference key: set SAKURADITE_API_KEY, or bind 127.0.0.1",
                param="api_key",
            )
        self.keys = keys
        self.hosts = _hosts(config.allowed_hosts)
        self.any_host = keys.inference is not None and not self.hosts

    def admit(self, exchange: Exchange, access: Access) -> None:
        """Let a request pass, or raise ForbiddenError or UnauthorizedError."""
        if access == "open":
            return
        if not self.any_host:
            self._check_host(exchange)
        if self.keys.inference is None:
            self._check_caller(exchange)
        if access == "admin":
            if self.keys.admin is None:
                raise UnauthorizedError("this server has no admin key; set SAKURADITE_ADMIN_KEY where it is started")
            if not self.keys.admin.matches(_bearer(exchange)):
                raise UnauthorizedError("the admin key is missing or wrong; send Authorization: Bearer ADMIN_KEY")
        elif self.keys.inference is not None and not self.keys.inference.matches(_bearer(exchange)):
            raise UnauthorizedError("the key is missing or wrong; send Authorization: Bearer API_KEY")

    def _check_host(self, exchange: Exchange) -> None:
        hosts = {host_of(value.decode("latin-1")) for name, value in exchange.scope["headers"] if name == b"host"}
        if not hosts or not all(is_loopback(host) or host in self.hosts for host in hosts):
            raise ForbiddenError("the Host header names another server; add it to allowed_hosts if it is this one")

    def _check_caller(self, exchange: Exchange) -> None:
        client = exchange.scope.get("client")
        if client is None or not is_loopback(client[0]):
            raise ForbiddenError("without an inference key only callers on the same machine are served")
        origin = exchange.headers.get(b"origin")
        if origin is not None and not _same_origin(origin, exchange.headers.get(b"host", b"")):
            raise ForbiddenError("requests from other web pages are not served; no cross-origin access is enabled")


def _hosts(allowed: Iterable[str]) -> frozenset[str]:
    return frozenset(host_of(host) for host in allowed)


def _bearer(exchange: Exchange) -> bytes:
    scheme, _, key = exchange.headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _same_origin(origin: bytes, host: bytes) -> bool:
    scheme, _, authority = origin.lower().partition(b"://")
    return scheme in (b"http", b"https") and authority == host.lower()
