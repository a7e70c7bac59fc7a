"""What the catalog must not forget, as two JSON files in the home: owner-only, replaced whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic import ValidationError as PydanticValidationError

from sakuradite.config import ModelConfig
from sakuradite.errors import ConfigurationError, InsufficientStorageError, InternalError
from sakuradite.operations import ModelCapabilities, ModelState, Operation, OperationError

MAX_COMPLETED = 256
"""Completed operations that are kept, the latest; pending and running ones all are."""


class ModelRecord(BaseModel):
    """One model that was loaded, is to be, or could not be. `session` is the Ray session in which it was so."""

    config: ModelConfig
    state: ModelState
    application: str
    operation: Operation
    revision: str | None = None
    path: str | None = None
    managed: bool = False
    created: int = 0
    asked: dict[str, float] = Field(default_factory=dict)
    """What one replica asked the scheduler for."""
    loaded_at: float | None = None
    capabilities: ModelCapabilities | None = None
    last_error: OperationError | None = None


class CatalogState(BaseModel):
    """catalog.json."""

    session: str = ""
    aliases: dict[str, str] = Field(default_factory=dict)
    models: dict[str, ModelRecord] = Field(default_factory=dict)


class History(BaseModel):
    """operations.json, oldest first."""

    operations: list[Operation] = Field(default_factory=list)


class Journal:
    """The files of one home. Each write is whole on disk when it returns.

    A write raises InsufficientStorageError where the disk is full, InternalError for whatever else hinders it.
    """

    def __init__(self, home: Path) -> None:
        self._folder = home / "catalog"

    def read(self) -> tuple[CatalogState, History]:
        """What was last written; empty in a new home. Raises ConfigurationError naming a file that is damaged."""
        return self._read("catalog.json", CatalogState), self._read("operations.json", History)

    def check(self) -> None:
        """Read and write both files, as they are. Raises what these do."""
        state, history = self.read()
        self.write_state(state)
        self.write_history(history)

    def write_state(self, state: CatalogState) -> None:
        """Replace catalog.json."""
        self._write("catalog.json", state)

    def write_history(self, history: History) -> None:
        """Replace operations.json."""
        self._write("operations.json", history)

    def _read[T: BaseModel](self, name: str, kind: type[T]) -> T:
        path = self._folder / name
        try:
            return kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return kind()
        except (OSError, PydanticValidationError) as error:
            raise ConfigurationError(
                f"{path} cannot be read ({type(error).__name__}); move it away to start with an empty catalog"
            ) from None

    def _write(self, name: str, content: BaseModel) -> None:
        draft = self._folder / f".{name}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft.unlink(missing_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.model_dump_json().encode())
                file.flush()
                os.fsync(descriptor)
            os.replace(draft, self._folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            kind = InsufficientStorageError if error.errno in (errno.ENOSPC, errno.EDQUOT) else InternalError
            raise kind(f"the daemon cannot write {self._folder / name}: {error.strerror}") from None
