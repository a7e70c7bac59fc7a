"""Compiling a model for shapes that come again: `ModelConfig.compile`.

The decoder layers go through torch.compile, which on CUDA also records their launches as CUDA graphs. Attention stays
as it is: what it reads depends on the request. So that shapes do come again, forwards are filled up to a few sizes
with tokens that see, and are seen by, nothing of a request; answers do not change.
"""

from __future__ import annotations

import logging
import os
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from sakuradite.engine.backend import Prefix, Read, Row
from sakuradite.engine.torch import fused, layers, linear
from sakuradite.engine.torch.backend import LayoutScorer
from sakuradite.engine.torch.forward import Caller
from sakuradite.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

SMALLEST = 16  # tokens; smaller forwards are filled up to it
STEPS = 4  # sizes between a power of two and the next: at most a fifth of a forward is filler, a tenth on average


def check(device: torch.device) -> None:
    """Raise ConfigurationError where nothing can be compiled."""
    problem = None
    if device.type == "cpu" and _compiler() is None:
        problem = "on a CPU it needs a C++ compiler, and there is no $CXX, g++ or clang++"
    elif device.type == "cuda" and find_spec("triton") is None:
        problem = "on CUDA it needs Triton, which is not installed"
    elif device.type not in ("cpu", "cuda"):
        problem = f"it works on CUDA and on a CPU, not on {device.type}"
    if problem:
        raise ConfigurationError(f"compile=True cannot be had: {problem}; load without it", param="compile")


def _compiler() -> str | None:
    """The C++ compiler that torch.compile would find."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )


def bucket(count: int) -> int:
    """The size that a forward of so many tokens is filled up to."""
    step = max(SMALLEST, (1 << (count - 1).bit_length()) // (2 * STEPS)) if count > 1 else SMALLEST
    return -(-count // step) * step


def buckets(most: int) -> list[int]:
    """All sizes up to that of `most` tokens."""
    found = [bucket(1)]
    while found[-1] < bucket(most):
        found.append(bucket(found[-1] + 1))
    return found


class CompiledCaller(Caller):
    """A `Caller` whose model's layers are compiled when first called."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model)
        self._graphs = device.type == "cuda"
        from transformers import AttentionInterface

        compiler: Any = torch.compiler
        AttentionInterface.register(layers.IMPLEMENTATION, compiler.disable(layers.attention_forward))
        module: Any
        for module in model.modules():  # oneDNN's packed weights are opaque to the compiler, and fast already
            if isinstance(module, linear.PackedLinear | linear.DenseLinear | fused.FusedMLP):
                module.forward = compiler.disable(module.forward)  # type: ignore[method-assign]
        for layer in decoder_layers(model):
            layer.compile(dynamic=True, mode="reduce-overhead" if self._graphs else None)

    def logits(self, ids: Tensor, keep: Tensor, positions: Tensor | None = None, **inputs: Any) -> Tensor:
        """See `Caller.logits`. What an earlier forward returned may be overwritten on CUDA."""
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return super().logits(ids, keep, positions, **inputs)


@torch.inference_mode()
def warm_up(scorer: LayoutScorer, device: torch.device, pass_tokens: int) -> None:
    """Run every size once, so that no request waits for it. On a CPU the probe has compiled all there is."""
    if device.type != "cuda":
        return
    for size in buckets(pass_tokens):
        scorer.score([(Prefix(()), Row((0,) * min(size, pass_tokens), (Read(0, (0,)),)))])


def decoder_layers(model: Any) -> list[Any]:
    """The model's decoder layers: the one list of modules that is as long as the configuration says.

    Raises ConfigurationError for a model that keeps them in another way.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise ConfigurationError(
            f"compile=True is not known for {type(model).__name__}; load without it", param="compile"
        )
    return list(lists[0])
