"""Gated MLPs in fewer passes over memory: the activation and the product ride on oneDNN's matrix products.

`down(act(gate(x)) * up(x))`, as most models since Llama have it, by stretches of rows that stay in the cache. What
looks like such a module is replaced only where it answers a random input alike, so one that does more is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from sakuradite.engine.torch.linear import PackedLinear

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_ROWS = 512
ACTIVATIONS = {
    "SiLU": ("swish", ""), "SiLUActivation": ("swish", ""),
    "GELUTanh": ("gelu", "tanh"), "PytorchGELUTanh": ("gelu", "tanh"),
    "GELU": ("gelu", "none"), "GELUActivation": ("gelu", "none"),
}  # fmt: skip
"""oneDNN's name of an activation, and which way of computing it, by class."""
SAMPLE_ROWS = 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference from the module that is replaced, over its largest output: rounding of the dtype, no more."""


class FusedMLP(nn.Module):
    """A gated MLP of packed layers, which it shares with the module that it replaces."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: tuple[str, str]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._activation, self._algorithm = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """What the module that it replaces gives, plus `residual`, a tensor of x's shape."""
        rows = x.reshape(-1, x.shape[-1])
        base = None if residual is None else residual.reshape(rows.shape)
        if (count := rows.shape[0]) <= CHUNK_ROWS:
            return self._stretch(rows, base).view_as(x) if count else torch.empty_like(x)
        out = torch.empty_like(rows)
        # evenly: a stretch of a single row would round differently
        parts = -(-count // CHUNK_ROWS)
        bases = [None] * parts if base is None else base.tensor_split(parts)
        for part, more, target in zip(rows.tensor_split(parts), bases, out.tensor_split(parts), strict=True):
            target.copy_(self._stretch(part, more))
        return out.view_as(x)

    def _stretch(self, x: Tensor, base: Tensor | None) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        ops = torch.ops.mkldnn
        gated = ops._linear_pointwise(x, gate.packed, gate.bias, self._activation, [], self._algorithm)
        wide = ops._linear_pointwise.binary(x, gated, up.packed, up.bias, "mul")
        product: Tensor = down(wide) if base is None else down.added(wide, base)
        return product


def fuse(model: nn.Module) -> int:
    """Replace the gated MLPs of a model whose linear layers are packed, and return how many."""
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (fused := _fused(child)) is not None:
                setattr(parent, name, fused)
                found += 1
    return found


@torch.inference_mode()
def _fused(mlp: nn.Module) -> FusedMLP | None:
    """What can stand for a module, or None."""
    gate, up, down = (getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, PackedLinear)):
        return None
    activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
    if activation is None or mlp._forward_pre_hooks or mlp._forward_hooks:
        return None
    fused = FusedMLP(gate, up, down, activation)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, SAMPLE_ROWS, gate.in_features, generator=draw).to(gate.dtype)
    try:
        expected = mlp(x)
    except TypeError:  # it wants more than a hidden state
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape[-1] != x.shape[-1]:
        return None
    largest = expected.abs().amax().clamp_min(1e-30)
    return fused if (fused(x) - expected).abs().amax() / largest <= TOLERANCE[gate.dtype] else None
