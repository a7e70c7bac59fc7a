"""Requests that killed a replica: refused for a while, because clients ask again after an error of the server."""

from __future__ import annotations

import time
from dataclasses import replace
from hashlib import blake2b

from sakuradite.errors import InferenceFailedError
from sakuradite.records import RequestRecord, pack_request

BLAMED_SECONDS = 300.0
"""A request is refused for this long."""
MAX_BLAMED = 64


class Blamed:
    """The requests that are refused, by what they ask."""

    def __init__(self) -> None:
        self._since: dict[bytes, float] = {}

    def add(self, request: RequestRecord) -> None:
        """Refuse it from now on."""
        self._since[_fingerprint(request)] = time.monotonic()

    def refuse(self, request: RequestRecord) -> None:
        """Raises InferenceFailedError for one that asks what killed a replica lately."""
        now = time.monotonic()
        for print_, since in list(self._since.items()):
            if now - since > BLAMED_SECONDS or len(self._since) > MAX_BLAMED:
                del self._since[print_]
        if self._since and _fingerprint(request) in self._since:
            raise InferenceFailedError(
                f"replicas died of the same request within the last {BLAMED_SECONDS / 60:g} minutes"
            )


def _fingerprint(request: RequestRecord) -> bytes:
    """The same for the same questions about the same state, whoever asks."""
    body, images = pack_request(replace(request, id="", timeout=None, trace=""))
    return blake2b(b"".join((body, *images)), digest_size=16).digest()
