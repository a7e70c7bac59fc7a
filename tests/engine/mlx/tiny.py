"""Tiny checkpoints of the families that MLX accepts, and what PyTorch says about the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Read, Row

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
_TIED = {"tie_word_embeddings": True}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 512,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "cohere": _TIED | {"logit_scale": 1.0},
    "cohere2": _TIED | {"logit_scale": 1.0, "num_hidden_layers": 4, "layer_types": None},
    "exaone4": {"sliding_window": 16, "num_hidden_layers": 4},
    "gemma2": {"sliding_window": 512},
    "gemma3_text": {"sliding_window": 16},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt2": _TIED,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "lfm2": _TIED,
    "lfm2_moe": _CONV | _EXPERTS | _TIED | {"num_dense_layers": 1},
    "mamba": {"state_size": 8, "expand": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo3": {"sliding_window": 16, "num_hidden_layers": 4},
    "phi3": {"original_max_position_embeddings": 512, "rope_parameters": _LONGROPE},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
}
"""What a family's configuration needs here, beyond `tests.checkpoints`."""


def float32(folder: Path, **settings: Any) -> ModelConfig:
    """The configuration of a tiny checkpoint on MLX in float32."""
    return ModelConfig(model=str(folder), **({"backend": "mlx", "dtype": "float32"} | settings))


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Ordinary tokens, the same on every run."""
    return tuple(np.random.default_rng(seed).integers(6, 300, count).tolist())


def row(suffix: tuple[int, ...], *offsets: int, vocabulary: int) -> Row:
    """A row that reads the whole distribution at the offsets, or at the end."""
    everything = tuple(range(vocabulary))
    return Row(suffix, tuple(Read(offset % len(suffix), everything) for offset in offsets or (-1,)))


class Reference:
    """The checkpoint in PyTorch, float32: plain forwards of complete prompts."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self.vocabulary: int = self._model.config.get_text_config().vocab_size

    def probabilities(self, prompt: tuple[int, ...]) -> NDArray[np.float32]:
        """[tokens, vocabulary]: the distribution after each token."""
        if prompt not in self._known:
            with self._torch.no_grad():
                logits = self._model(self._torch.tensor([prompt])).logits[0]
            self._known[prompt] = self._torch.softmax(logits.float(), -1).numpy()
        return self._known[prompt]
