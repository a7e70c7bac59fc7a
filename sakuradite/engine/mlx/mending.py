"""Parts of mlx-lm's models that compute something else than the model they stand for, put right after loading.

Each function is named after the family that it mends. A part is replaced where it is called, and its weights stay where
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sakuradite.engine.mlx.body import stand_in
from sakuradite.engine.mlx.families import Settings


def gemma(model: Any, settings: Settings) -> None:
    """GELU by its tanh approximation, with which Gemma was trained; mlx-lm has the exact one."""
    import mlx.nn as nn

    for layer in model.layers:
        stand_in(layer, "mlp", _Gated(layer.mlp, nn.gelu_approx))


def starcoder2(model: Any, settings: Settings) -> None:
    """GELU by its tanh approximation; mlx-lm has the exact one."""
    import mlx.nn as nn

    for layer in model.layers:
        stand_in(layer, "mlp", _Plain(layer.mlp.c_fc, nn.gelu_approx, layer.mlp.c_proj))


def gpt_neox(model: Any, settings: Settings) -> None:
    """The exact GELU; mlx-lm has the tanh approximation."""
    import mlx.nn as nn

    for layer in model.layers:
        stand_in(layer, "mlp", _Plain(layer.mlp.dense_h_to_4h, nn.gelu, layer.mlp.dense_4h_to_h))


def glm(model: Any, settings: Settings) -> None:
    """A rotary embedding over the part of the head that the settings name; mlx-lm rotates the whole of it."""
    import mlx.nn as nn

    for layer in model.layers:
        turned = int(layer.self_attn.head_dim * settings["partial_rotary_factor"])
        layer.self_attn.rope = nn.RoPE(turned, traditional=True, base=settings["rope_theta"])


def jamba(model: Any, settings: Settings) -> None:
    """Experts weighed by the softmax over all of them; mlx-lm takes it over the chosen ones."""
    for layer in model.layers:
        if "router" in layer.feed_forward:
            stand_in(layer, "feed_forward", _Experts(layer.feed_forward))


class _Gated:
    """A gated MLP with another activation."""

    def __init__(self, inner: Any, activation: Callable[[Any], Any]) -> None:
        self._inner, self._activation = inner, activation

    def __call__(self, x: Any) -> Any:
        inner = self._inner
        return inner.down_proj(self._activation(inner.gate_proj(x)) * inner.up_proj(x))


class _Plain:
    """An MLP of two layers with another activation between them."""

    def __init__(self, up: Any, activation: Callable[[Any], Any], down: Any) -> None:
        self._up, self._activation, self._down = up, activation, down

    def __call__(self, x: Any) -> Any:
        return self._down(self._activation(self._up(x)))


class _Experts:
    """Jamba's experts: the weights of the chosen ones do not add up to one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, x: Any) -> Any:
        import mlx.core as mx

        count = self._inner.num_experts_per_tok
        scores = mx.softmax(self._inner.router(x).astype(mx.float32), axis=-1)
        chosen = mx.argpartition(-scores, kth=count - 1, axis=-1)[..., :count]
        weights = mx.take_along_axis(scores, chosen, axis=-1).astype(x.dtype)
        return (self._inner.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2)
