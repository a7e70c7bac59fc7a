"""Rotary frequencies that depend on how long the input is, and how a batch keeps its rows from disturbing one another.

LongRoPE takes one set of frequencies up to a boundary and another beyond it; dynamic NTK recomputes them for every
length. Transformers decides by the largest position in a forward, so one long row would change its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

type Regime = int
"""Rows of one regime share their frequencies and may share a forward. 0 is the checkpoint's ordinary one."""


class Rotary:
    """The frequency regimes of a model. Made from the (text) configuration; knows nothing of weights."""

    def __init__(self, config: Any) -> None:
        rope = getattr(config, "rope_parameters", None) or {}
        sets = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
        self.kinds = {str(s.get("rope_type", "default")) for s in sets}
        self.dynamic = "dynamic" in self.kinds
        boundaries = {
            s.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            for s in sets
            if s.get("rope_type") in ("longrope", "dynamic")
        }
        known: list[int] = [boundary for boundary in boundaries if boundary]
        self.boundary: int | None = None
        if known or self.dynamic:
            self.boundary = min(known, default=config.max_position_embeddings)

    def regime(self, tokens: int) -> Regime:
        """The regime of a complete input of so many tokens."""
        if self.boundary is None or tokens <= self.boundary:
            return 0
        return tokens if self.dynamic else 1

    def anchor(self, regime: Regime) -> int | None:
        """A position that, present in a forward, makes Transformers take the frequencies of this regime."""
        return self.boundary if regime == 1 and not self.dynamic else None

    def reset(self, model: torch.nn.Module) -> None:
        """Forget frequencies that grew with earlier, longer inputs: a row must not answer by what ran before it."""
        if not self.dynamic:
            return
        module: Any
        for module in model.modules():
            if hasattr(module, "original_inv_freq") and hasattr(module, "max_seq_len_cached"):
                original = module.original_inv_freq.to(module.inv_freq.device)
                module.register_buffer("inv_freq", original, persistent=False)
                module.max_seq_len_cached = module.original_max_seq_len
