"""From a configuration to a tokenizer and a loaded backend, on the worker thread."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Backend
from sakuradite.engine.tokenizer import FastTokenizer, Tokenizer
from sakuradite.errors import ConfigurationError, MissingExtraError, ModelLoadFailedError, UnsupportedModelError

type Loader = Callable[[ModelConfig, Path | None], tuple[Tokenizer, Backend]]


def load(config: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer, Backend]:
    """The tokenizer and the backend of a model. The tokenizer comes first: it is quick, and may refuse the checkpoint.

    Raises UnsupportedModelError, InsufficientResourcesError, ModelLoadFailedError or MissingExtraError.
    """
    if config.compile and config.backend == "fake":
        raise _not_compiled("fake")
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
    there = [name for name, module in (("mlx", "mlx_lm"), ("torch", "torch")) if importlib.util.find_spec(module)]
    if config.backend != "auto":
        if config.backend not in there:
            raise MissingExtraError(f"backend={config.backend!r}", config.backend)
        return _load_with(config.backend, config, checkpoint)
    if not there:
        raise MissingExtraError("running a model in this process", "torch")
    if there == ["mlx", "torch"]:
        if not (sys.platform == "darwin" and platform.machine() == "arm64"):
            return _load_with("torch", config, checkpoint)
        try:
            return _load_with("mlx", config, checkpoint)
        except (UnsupportedModelError, ConfigurationError, MissingExtraError) as error:
            # What MLX refuses, or the installed versions of its libraries cannot run, is torch's.
            backend = _load_with("torch", config, checkpoint)
            said = f"backend auto took torch on this Mac, because MLX refused the model: {error}"
            backend.facts = replace(backend.facts, warnings=(*backend.facts.warnings, said))
            return backend
    return _load_with(there[0], config, checkpoint)


def _load_with(name: str, config: ModelConfig, checkpoint: Path) -> Backend:
    if config.compile and name != "torch":
        raise _not_compiled(name)
    runtime = importlib.import_module(f"sakuradite.engine.{name}")
    backend: Backend = runtime.load(config, checkpoint)
    return backend


def _not_compiled(name: str) -> ConfigurationError:
    return ConfigurationError(f"compile=True is for backend='torch', and this model runs on {name!r}", param="compile")
