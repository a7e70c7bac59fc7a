"""MLX: Apple Silicon through Metal, and the same code on MLX's CPU build for Linux. Imports MLX only in `load`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sakuradite.config import ModelConfig
    from sakuradite.engine.backend import Backend


def load(config: ModelConfig, checkpoint: Path) -> Backend:
    """The model of a checkpoint folder, on the thread that will use it.

    Raises MissingExtraError, UnsupportedModelError with the reason, ModelLoadFailedError or InsufficientResourcesError.
    """
    from sakuradite.engine.mlx import runtime
    from sakuradite.engine.mlx.loading import load_text

    loaded = load_text(config, checkpoint)
    from sakuradite.engine.mlx.text import TextBackend

    return TextBackend(loaded, runtime.cache_bytes(config.max_cache_bytes), config.max_input_tokens)
