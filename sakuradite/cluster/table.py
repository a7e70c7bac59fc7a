"""What every router knows of the models, sent by the catalog whenever it changes: no round trip per request."""

from __future__ import annotations

from dataclasses import dataclass, field

from sakuradite.errors import ModelLoadingError, ModelNotFoundError
from sakuradite.http.gateway import ResidentModel
from sakuradite.operations import ModelState

DEFAULT_ALIASES = ("jev-latest", "jev-preview")
"""System One's names for "the model of this server"; `default` is ours. An alias of that name takes precedence."""
RETRY_AFTER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One model that is resident or on its way. `resident` is None until it has answered its probe."""

    state: ModelState
    application: str
    timeout: float
    cold_start: str
    resident: ResidentModel | None = None
    load: str = ""
    """The operation that loaded it: an application may have the name of an earlier one. Empty for a declared model."""


@dataclass(frozen=True)
class Table:
    """The models by id in the order of loading, and the aliases. `version` grows with every change."""

    version: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    default_model: str | None = None
    """The configured one; an alias `default` takes precedence."""

    def default(self) -> str | None:
        """The default model: the one that `default` names, else the only or first loaded one."""
        if (named := self.aliases.get("default", self.default_model)) is not None:
            return named
        return next((id_ for id_, entry in self.entries.items() if entry.state == "ready"), None)

    def names(self) -> dict[str, str]:
        """Every alias that works and its model."""
        names = dict(self.aliases)
        if (default := self.default()) is not None:
            for alias in ("default", *DEFAULT_ALIASES):
                names.setdefault(alias, default)
        return names

    def ready(self) -> list[ResidentModel]:
        """The models that answer."""
        return [e.resident for e in self.entries.values() if e.state == "ready" and e.resident is not None]

    def resolve(self, name: str) -> ResidentModel:
        """The model of an id or alias. Raises ModelNotFoundError, or ModelLoadingError while it is on its way."""
        entry = self.entries.get(name) or self.entries.get(self.names().get(name, ""))
        if entry is None or entry.state in ("unloaded", "failed", "draining"):
            raise ModelNotFoundError(
                f"no model {name!r} is loaded; sakuradite load it, or see GET /v1/models", param="model"
            )
        if entry.state == "loading" or entry.resident is None:
            raise ModelLoadingError(f"{name} is being loaded", param="model", retry_after=RETRY_AFTER_SECONDS)
        return entry.resident
