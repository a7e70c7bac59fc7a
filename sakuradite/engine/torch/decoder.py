"""Decoder layers in fewer operators, for packed forwards on a CPU: the layers of Llama, Mistral, Qwen2 and Qwen3.

`x + o(attention(rotary(qkv(norm(x)))))`, then `x + mlp(norm(x))`: queries, keys and values are one product, rotary
positions are applied to queries and keys together, residuals ride on the products. The last layer computes what follows
its keys and values for the tokens that are read alone. A layer is replaced where its class is known to be of this form
and it answers a random input alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sakuradite.engine.torch.attention import Shape
from sakuradite.engine.torch.fused import TOLERANCE, FusedMLP
from sakuradite.engine.torch.layers import attend, attend_rows, layer_window
from sakuradite.engine.torch.linear import PackedLinear
from sakuradite.engine.torch.pieces import Pass, Piece, current_pass, running

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CLASSES = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
SAMPLE = (9, 7)  # tokens of the pieces that a layer is compared on


class FusedLayer(nn.Module):
    """A decoder layer, of whose modules it keeps all but the projections that it joins."""

    def __init__(self, layer: Any, last: bool) -> None:
        super().__init__()
        self._replaced = (layer,)  # in a tuple: no module of this one
        attn = layer.self_attn
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv_proj = PackedLinear(_joined([getattr(attn, name) for name in PROJECTIONS]))
        self.o_proj, self.mlp = attn.o_proj, layer.mlp
        self._width = attn.head_dim
        self._heads, self._kv_heads = (getattr(attn, n).out_features // attn.head_dim for n in PROJECTIONS[:2])
        self._layer, self._last = attn.layer_idx, last
        self._shape = Shape(attn.scaling, layer_window(attn, getattr(attn, "sliding_window", None)))
        self._head_eps, weight = 0.0, None
        if (norm := getattr(attn, "q_norm", None)) is not None:
            self._head_eps = norm.variance_epsilon
            weight = torch.cat([norm.weight.expand(self._heads, -1), attn.k_norm.weight.expand(self._kv_heads, -1)])
        self.head_norm: Tensor | None
        self.register_buffer("head_norm", weight, persistent=False)

    def forward(self, x: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **unused: Any) -> Tensor:
        """The hidden states [1, n, width] after the layer; after the last one, right only where they are read."""
        current = current_pass()
        if current is None or x.shape[0] != 1 or x.shape[1] != current.tokens:
            raise RuntimeError("a fused layer was called outside a packed forward")
        cos, sin = position_embeddings
        both = self._heads + self._kv_heads
        made = self.qkv_proj(_normed(x, self.input_layernorm)).view(current.tokens, -1, self._width)
        turned = made[:, :both]
        if self.head_norm is not None:
            turned = rms_norm(turned, self.head_norm, self._head_eps)
        turned = rotated(turned, cos[0], sin[0])
        q, k, v = turned[:, : self._heads], turned[:, self._heads :], made[:, both:]
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if not self._last:
            return self._rest(x, attend(current, self._layer, q, k, v, self._shape))
        rows = current.rows()
        out = attend_rows(current, self._layer, q, k, v, self._shape)
        return x.index_copy(1, torch.tensor(rows, dtype=torch.long), self._rest(x[:, rows], out)) if rows else x

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention. x [1, n, width], attended [n, kv_heads, group, d]."""
        x = self.o_proj.added(attended.view(1, x.shape[1], -1), x)
        y: Tensor = self.mlp(_normed(x, self.post_attention_layernorm), x)
        return y

    def separate(self) -> Any:
        """The layer that was replaced, given back the projections that were joined."""
        (layer,) = self._replaced
        sizes = [n * self._width for n in (self._heads, self._kv_heads, self._kv_heads)]
        bias = self.qkv_proj.bias
        biases: Sequence[Tensor | None] = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        for name, weight, part in zip(PROJECTIONS, torch.split(self.qkv_proj.weight, sizes), biases, strict=True):
            setattr(layer.self_attn, name, PackedLinear(_linear(weight, part)))
        return layer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS normalisation over the last dimension as Llama has it: in float32, scaled by the weight in the dtype."""
    scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return (x * scale).mul_(weight)
    return x.float().mul_(scale).to(x.dtype).mul_(weight)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [n, heads, d], whose halves turn into one another. cos, sin: [n, d]."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None, :half]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def fuse_layers(model: nn.Module) -> int:
    """Replace the layers of a model whose attention is the packed one, and return how many."""
    found = 0
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for i, layer in enumerate(layers):
            try:
                fused = _fused(layer, last=i == len(layers) - 1)
            except Exception:  # a form that a later Transformers gave it; the layers are right as they are, but slower
                logger.warning("layers of the class %s cannot be fused", type(layer).__name__, exc_info=True)
                break
            if fused is not None:
                layers[i] = fused
                found += 1
                for name in PROJECTIONS:
                    delattr(layer.self_attn, name)
    return found


def restore(model: nn.Module) -> None:
    """Put replaced layers back."""
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for i, layer in enumerate(layers):
            if isinstance(layer, FusedLayer):
                layers[i] = layer.separate()


@torch.inference_mode()
def _fused(layer: Any, last: bool) -> FusedLayer | None:
    """What can stand for a layer, or None."""
    if type(layer).__name__ not in CLASSES or not isinstance(layer.mlp, FusedMLP):
        return None
    attn = layer.self_attn
    if not all(type(getattr(attn, name)) is PackedLinear for name in (*PROJECTIONS, "o_proj")):
        return None
    if len({getattr(attn, name).bias is None for name in PROJECTIONS}) > 1:
        return None
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return None
    fused = FusedLayer(layer, last)
    current = Pass()
    for size in SAMPLE:
        current.add(Piece(range(size), 0, reads=((0, ()), (size - 1, ()))))
    draw = torch.Generator().manual_seed(0)
    dtype = attn.q_proj.dtype
    x = torch.randn(1, current.tokens, attn.q_proj.in_features, generator=draw).to(dtype)
    angles = torch.randn(1, current.tokens, attn.head_dim // 2, generator=draw).mul_(torch.pi).repeat(1, 1, 2)
    embeddings = (angles.cos().to(dtype), angles.sin().to(dtype))
    with running(current):
        expected, found = (one(x, position_embeddings=embeddings) for one in (layer, fused))
    rows = current.rows() if last else slice(None)
    expected, found = expected[:, rows], found[:, rows]
    close = (found - expected).abs().amax() <= TOLERANCE[dtype] * expected.abs().amax()
    return fused if close else None


def _joined(layers: Sequence[PackedLinear]) -> nn.Linear:
    """One linear layer that gives what several give, side by side."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _linear(torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _normed(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, norm.weight, norm.variance_epsilon)
