"""Which layout a model gets, decided from its configuration; what claims reuse must also pass the probe at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sakuradite.engine.backend import Layout
from sakuradite.engine.torch.rotary import Rotary

if TYPE_CHECKING:
    import torch

VALIDATED_HYBRIDS = frozenset({"qwen3_5_text", "lfm2", "nemotron_h"})
"""Recurrent layouts whose cloned state was proven right, by `model_type`."""

ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})
STATELESS = frozenset({"mlp", "moe", "sparse", "dense"})  # layers that look at one token at a time
RECURRENT_SETTINGS = (
    "linear_conv_kernel_dim", "conv_L_cache", "mamba_d_state", "mamba_d_conv", "ssm_state_size", "state_size",
    "time_step_rank", "lru_width",
)  # fmt: skip
SHARED_KV_SETTINGS = ("num_kv_shared_layers", "kv_shared_layer_indices", "cla_share_factor")


@dataclass(frozen=True, slots=True)
class Decision:
    """A layout, and in a sentence why."""

    layout: Layout
    reason: str


def decide(config: Any, dtype: torch.dtype, pluggable: bool) -> Decision:
    """The layout for a model's (text) configuration. `pluggable`: Transformers' interface can give its attention.

    packed for full and sliding attention; cloned for validated hybrids, except in bfloat16; padded for all others.
    """
    import torch

    kinds = layer_kinds(config)
    if getattr(config, "cache_implementation", None) == "quantized":
        return Decision("padded", "its key/value cache is quantised")
    if any(getattr(config, name, None) for name in SHARED_KV_SETTINGS):
        return Decision("padded", "its layers share keys and values with one another")
    if Rotary(config).dynamic:
        return Decision("padded", "its rotary frequencies change with the input's length (dynamic)")
    if not getattr(config, "is_causal", True):
        return Decision("padded", "its attention is not causal")
    if other := sorted(kinds - ATTENTION - STATELESS):
        return _recurrent(config, other, dtype == torch.bfloat16)
    if not pluggable:
        return Decision("padded", "its attention cannot be replaced through Transformers' attention interface")
    sliding = "sliding_attention" in kinds
    return Decision("packed", "sliding-window and full attention" if sliding else "full attention in every layer")


def _recurrent(config: Any, kinds: list[str], bfloat16: bool) -> Decision:
    names = ", ".join(kinds)
    if config.model_type not in VALIDATED_HYBRIDS:
        return Decision("padded", f"its {names} layers are not among the validated hybrid layouts")
    if bfloat16:
        return Decision(
            "padded", f"its {names} layers keep the plain path in bfloat16; float16 or float32 reuse prefixes"
        )
    if Rotary(config).boundary is not None:
        return Decision("padded", f"its {names} layers stand beside rotary frequencies that depend on the length")
    return Decision("cloned", f"a validated hybrid layout with {names} layers")


def declared_window(config: Any) -> int | None:
    """The sliding window that a configuration sets, where its class knows one.

    A config.json may name a window that the model's class has no use for; Transformers keeps it and ignores it.
    """
    return getattr(config, "sliding_window", None) if hasattr(type(config), "sliding_window") else None


def declared_kinds(config: Any) -> list[str] | None:
    """The kind of each layer that a configuration lists, where its class knows such a list, as for a window."""
    for name in ("layer_types", "layers_block_type"):
        if hasattr(type(config), name) and (listed := getattr(config, name)):
            return list(listed)
    return None


def layer_kinds(config: Any) -> set[str]:
    """The kinds of layers that a configuration describes; "recurrent" where only settings say so."""
    kinds = set(declared_kinds(config) or ())
    if not kinds:
        window = declared_window(config) and getattr(config, "use_sliding_window", True)
        kinds = {"sliding_attention" if window else "full_attention"}
    recurrent = any(getattr(config, name, None) for name in RECURRENT_SETTINGS)
    if recurrent and not kinds - ATTENTION - STATELESS:
        kinds.add("recurrent")
    return kinds
