"""Gated MLPs in fewer passes: the same answers, by stretches of any length, and only where nothing else is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from sakuradite.engine.torch import fused, linear
from tests.engine.torch.prompts import loaded

needs_bfloat16 = pytest.mark.skipif(
    not linear.available(torch.device("cpu"), torch.bfloat16), reason="needs oneDNN's bfloat16"
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]


class Gated(nn.Module):
    """What models since Llama have."""

    def __init__(self, activation: nn.Module, bias: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 40, bias=bias), nn.Linear(24, 40, bias=bias)
        self.down_proj = nn.Linear(40, 24, bias=bias)
        self.act_fn, self.factor = activation, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.factor)
        return y


def holding(mlp: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A model of one MLP, its layers packed."""
    model = nn.Sequential(mlp).eval().to(dtype).requires_grad_(False)
    linear.pack(model)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU()], ids=["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 17])
def test_the_same_products_in_stretches(
    rows: int, activation: nn.Module, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "CHUNK_ROWS", 8)
    model = holding(Gated(activation, bias), dtype)
    x = torch.randn(1, rows, 24, dtype=dtype)
    expected = model(x)
    assert fused.fuse(model) == 1
    assert isinstance(model[0], fused.FusedMLP)
    found = model(x)
    assert found.shape == x.shape
    assert torch.allclose(found, expected, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_no_stretch_has_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row answers to the last bit as it does elsewhere among others: a lone one would round differently."""
    monkeypatch.setattr(fused, "CHUNK_ROWS", 8)
    model = holding(Gated(nn.SiLU()))
    fused.fuse(model)
    x = torch.randn(1, 17, 24)
    whole = model(x)
    for count in (2, 5, 8, 9, 16):
        assert torch.equal(model(x[:, 17 - count :]), whole[:, 17 - count :])
    assert model(x[:, :0]).shape == (1, 0, 24)


def test_a_module_that_does_more_is_left_alone() -> None:
    model = holding(Gated(nn.SiLU(), factor=1.5))
    assert fused.fuse(model) == 0
    assert type(model[0]) is Gated
    assert fused.fuse(holding(Gated(nn.Hardswish()))) == 0


def test_plain_layers_are_left_alone() -> None:
    assert fused.fuse(nn.Sequential(Gated(nn.SiLU())).eval()) == 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_models_have_theirs_fused(architecture: str, tiny: Callable[..., Path]) -> None:
    backend = loaded(tiny(architecture))
    layers = backend._model.model.layers
    assert all(isinstance(layer.mlp, fused.FusedMLP) for layer in layers)
