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
    from sakuradite.engine.mlx.loading import load_checkpoint

    loaded = load_checkpoint(config, checkpoint)
    if loaded.translation.family.images:
        from sakuradite.engine.mlx.vision import VisionBackend

        return VisionBackend(loaded, config.max_input_tokens)
    from sakuradite.engine.mlx.text import TextBackend

    return TextBackend(loaded, runtime.cache_bytes(config.max_cache_bytes), config.max_input_tokens)


def check(checkpoint: Path) -> None:
    """Raise what `load` would raise for this checkpoint's settings, without its weights and without importing MLX."""
    from sakuradite.engine.mlx import runtime
    from sakuradite.engine.mlx.translation import read_settings, translate

    runtime.require_for(read_settings(checkpoint)["model_type"])
    translation = translate(checkpoint)
    if translation.family.images:
        runtime.require("mlx-vlm", runtime.MINIMUM_MLX_VLM)
