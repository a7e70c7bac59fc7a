"""From a configuration to a tokenizer and a loaded backend, on the worker thread."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Backend
from sakuradite.engine.tokenizer import FastTokenizer, Tokenizer
from sakuradite.errors import MissingExtraError, ModelLoadFailedError, UnsupportedModelError

type Loader = Callable[[ModelConfig, Path | None], tuple[Tokenizer, Backend]]


def load(config: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer, Backend]:
    """The tokenizer and the backend of a model. The tokenizer comes first: it is quick, and may refuse the checkpoint.

    Raises UnsupportedModelError, InsufficientResourcesError, ModelLoadFailedError or MissingExtraError.
    """
    if config.backend == "fake":
        from sakuradite.engine import fake

        return fake.load(config)
    if checkpoint is None:
        raise ModelLoadFailedError(f"{config.model}: no checkpoint folder was given")
    tokenizer = FastTokenizer(checkpoint)
    backend = _runtime(config, checkpoint)
    largest = max(tokenizer.largest_text_token, *tokenizer.opening(tokenizer.frame.opening + "a"))
    if largest >= backend.facts.vocabulary_size:
        size = backend.facts.vocabulary_size
        backend.close()
        raise UnsupportedModelError(
            f"the tokenizer gives token {largest}, and the model's vocabulary has only {size} entries"
        )
    return tokenizer, backend


def _runtime(config: ModelConfig, checkpoint: Path) -> Backend:
    """The backend that the configuration names; `auto` prefers MLX on Apple Silicon, else PyTorch (R10.3)."""
    name = config.backend
    torch, mlx = (importlib.util.find_spec(module) is not None for module in ("torch", "mlx_lm"))
    if name == "auto":
        apple = sys.platform == "darwin" and platform.machine() == "arm64"
        name = "mlx" if mlx and (apple or not torch) else "torch"
        if name == "mlx" and torch:
            from sakuradite.engine.mlx import load as load_mlx

            try:
                return load_mlx(config, checkpoint)
            except UnsupportedModelError:
                name = "torch"  # a checkpoint that MLX cannot run is torch's
    if name == "mlx":
        if not mlx:
            raise MissingExtraError("the MLX backend", "mlx")
        from sakuradite.engine.mlx import load as load_mlx

        return load_mlx(config, checkpoint)
    if not torch:
        raise MissingExtraError("the PyTorch backend", "torch")
    from sakuradite.engine.torch import load as load_torch

    return load_torch(config, checkpoint)
