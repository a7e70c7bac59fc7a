"""What administration answers with: operations, the status of models, the metadata of checkpoints.

Pydantic models, as they are on the wire.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sakuradite.config import ModelConfig

type OperationStatus = Literal["pending", "running", "succeeded", "failed", "cancelled"]
type ModelState = Literal["unloaded", "loading", "ready", "draining", "failed"]


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Progress(_Wire):
    """How far an operation is. Bytes are None where there is nothing to count."""

    phase: str = "pending"
    """pending, resolving, waiting (another process downloads the model, or resources are taken), downloading,
    converting, scheduling, loading, probing, draining, done.
    """
    reason: str | None = None
    """What it waits for."""
    bytes_done: int | None = None
    bytes_total: int | None = None


class OperationError(_Wire):
    """Why an operation ended without success, in the terms of the error contract."""

    code: str
    message: str
    status_code: int


class Operation(_Wire):
    """A pull or a load, from acceptance to its end. A poll answers 200 whatever became of it."""

    id: str
    kind: Literal["pull", "load"]
    model: str
    status: OperationStatus = "pending"
    progress: Progress = Field(default_factory=Progress)
    result: dict[str, Any] | None = None
    error: OperationError | None = None
    created: float = 0.0
    """Seconds since the epoch."""
    finished: float | None = None


class BackendSupport(_Wire):
    """Whether one backend can load a checkpoint, and why not."""

    supported: bool
    reason: str | None = None


class Inspection(_Wire):
    """Facts about a checkpoint that need no weights."""

    model: str
    revision: str | None = None
    """The resolved commit; None for a local folder."""
    architecture: str | None = None
    model_type: str | None = None
    modalities: tuple[str, ...] = ("text",)
    context_length: int | None = None
    vocabulary_size: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    weight_bytes: int | None = None
    parameters: int | None = None
    tokenizer: str | None = None
    """The class or kind of the fast tokenizer; None when there is none."""
    chat_template: bool = False
    prefix_reuse: str | None = None
    """Which reuse the configuration is eligible for, or why none."""
    backends: dict[str, BackendSupport] = Field(default_factory=dict)
    files: dict[str, int] = Field(default_factory=dict)
    """Bytes by file name."""
    calibrated: Literal[False] = False
    """Probabilities are normalised over the candidates; they are not calibrated."""


class ModelCapabilities(_Wire):
    """What a resident model can do, as its worker found it."""

    architecture: str
    backend: str
    device: str
    dtype: str
    context_length: int
    max_input_tokens: int
    max_questions: int
    modalities: tuple[str, ...] = ("text",)
    parameters: int | None = None
    weight_bytes: int | None = None
    prefix_reuse: str = "none"
    """How questions share their prefix, or the reason why they do not."""
    label_mass: float | None = None
    """Mass that the model gave to all labels in the load-time probe."""
    warnings: tuple[str, ...] = ()


class ReplicaCounts(_Wire):
    """Replicas wanted and answering."""

    target: int = 0
    ready: int = 0


class StorageStatus(_Wire):
    """A checkpoint on disk. `managed` ones live in the home and can be removed."""

    managed: bool
    path: str | None = None
    bytes: int | None = None
    revision: str | None = None
    complete: bool = True


class ModelStatus(_Wire):
    """One stored or resident model."""

    model: str
    status: ModelState
    config: ModelConfig | None = None
    capabilities: ModelCapabilities | None = None
    replicas: ReplicaCounts = Field(default_factory=ReplicaCounts)
    storage: StorageStatus | None = None
    aliases: tuple[str, ...] = ()
    operation_id: str | None = None
    last_error: OperationError | None = None
    loaded_at: float | None = None


class Removed(_Wire):
    """The answer to `rm`."""

    model: str
    status: Literal["removed"] = "removed"


class Alias(_Wire):
    """One entry of the alias table; `default` is the default model."""

    alias: str
    model: str
