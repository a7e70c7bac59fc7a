"""Where a client runs and why: the settings it ended up with, each with its origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from sakuradite.config import ClientSettings

SECRET = ("api_key", "admin_key")
EMBEDDED_ONLY = ("revision", "backend", "device", "dtype", "offline")


@dataclass(frozen=True, slots=True)
class Description:
    """`runs` is "embedded" or "http", `why` one sentence, `settings` every value with where it came from.

    An origin is "argument", the name of an environment variable, the path of config.toml, or "default". A key is only
    said to be set.
    """

    runs: Literal["embedded", "http"]
    why: str
    settings: dict[str, tuple[str, str]]

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """The description of some settings."""
        origin = settings.origin
        shown = {}
        for name, where in origin.items():
            value = getattr(settings, name)
            shown[name] = ("set" if name in SECRET and value else "not set" if value is None else str(value), where)
        if settings.base_url:
            return cls("http", f"base_url is {settings.base_url} ({origin['base_url']})", shown)
        why = "base_url is empty (argument)" if settings.base_url == "" else "no base_url is set"
        return cls("embedded", why, shown)

    def __str__(self) -> str:
        lines = [f"{self.runs}: {self.why}"]
        lines += [f"  {name} = {value} ({where})" for name, (value, where) in self.settings.items()]
        return "\n".join(lines)
