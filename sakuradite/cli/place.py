"""What the options before a command say: which daemon, which home."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from sakuradite import SyncClient


@dataclass(frozen=True, slots=True)
class Place:
    """The daemon and the home that the command is about; None where they were not given."""

    base_url: str | None = None
    home: Path | None = None

    def daemon_url(self) -> str:
        """The daemon's URL: --base-url, SAKURADITE_BASE_URL, config.toml, else the default on this machine."""
        from sakuradite.config import DEFAULT_BASE_URL, client_settings

        return client_settings(self.home, base_url=self.base_url).base_url or DEFAULT_BASE_URL

    def client(self, retries: int = 0) -> SyncClient:
        """An open client of the daemon."""
        from sakuradite import Sakuradite

        return Sakuradite(base_url=self.daemon_url(), home=self.home, retries=retries).open()


def place_of(context: typer.Context) -> Place:
    """The place of a command, from the options before it."""
    found = context.find_root().obj
    return found if isinstance(found, Place) else Place()
