"""Tiny checkpoints of the families that MLX accepts, and what PyTorch says about the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Read, Row
from tests.checkpoints import ARCHITECTURES

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

_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 64,
}
_JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "cohere": _TIED | {"logit_scale": 1.0},
    "cohere2": _TIED | {"logit_scale": 1.0, "num_hidden_layers": 4, "layer_types": None},
    "deepseek_v2": _LATENT
    | _ROUTED
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "rope_parameters": DEEPSEEK_YARN},
    "deepseek_v3": _LATENT | _ROUTED,
    "dots1": _ROUTED,
    "exaone4": {"sliding_window": 16, "num_hidden_layers": 4},
    "gemma2": {"sliding_window": 512},
    "gemma3_text": {"sliding_window": 16},
    "gemma": _TIED,
    "glm4_moe": _ROUTED,
    "glm4_moe_lite": _LATENT | _ROUTED,
    "gpt2": _TIED,
    "falcon_mamba": {"state_size": 8, "expand": 2},
    "gpt_neox": {"num_key_value_heads": 4, "intermediate_size": 128},
    "jamba": _JAMBA,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "lfm2": _TIED,
    "lfm2_moe": _CONV | _EXPERTS | _TIED | {"num_dense_layers": 1},
    "mamba": {"state_size": 8, "expand": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo3": {"sliding_window": 16, "num_hidden_layers": 4},
    "phi3": {"original_max_position_embeddings": 512, "rope_parameters": _LONGROPE},
    "starcoder2": {"sliding_window": None},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
}
"""What a family's configuration needs here, beyond `tests.checkpoints`."""


_SIZES = {
    "vocab_size": 439,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}
_PATCHES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE_TOKEN = 430
_IDEFICS3: dict[str, Any] = {
    "text_config": {"model_type": "llama"}
    | _SIZES
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}},
    "vision_config": _PATCHES | {"image_size": 28, "patch_size": 7, "initializer_range": 0.3},
    "scale_factor": 2,
    "image_token_id": IMAGE_TOKEN,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_QWEN3_5: dict[str, Any] = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
    },
    "image_token_id": IMAGE_TOKEN,
    "tie_word_embeddings": False,
}
WITH_TEXT_CONFIG: dict[str, dict[str, Any]] = {
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3 | {"vision_config": _PATCHES | {"image_size": 56, "patch_size": 4, "initializer_range": 0.3}},
    "lfm2_vl": {
        "text_config": {"model_type": "lfm2"} | _SIZES | _CONV | _TIED,
        "vision_config": {"model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 64}
        | _PATCHES
        | {"vision_use_head": False},
        "downsample_factor": 2,
        "projector_hidden_size": 32,
        "image_token_id": IMAGE_TOKEN,
    }
    | _TIED,
    "qwen3_5": _QWEN3_5 | {"text_config": {"model_type": "qwen3_5_text"} | _SIZES | ARCHITECTURES["qwen3_5_text"]},
}
"""Checkpoints whose text model is a part of a larger one."""


def build_with_text_config(architecture: str, folder: Path) -> Path:
    """Write such a checkpoint, as Transformers saves it. It has no tokenizer and no processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(architecture, **WITH_TEXT_CONFIG[architecture])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).float().eval()
        with torch.no_grad():
            for weight in model.parameters():  # some start at zero and would hide what feeds them
                if weight.dim() > 1 and not weight.any():
                    weight.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


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
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        self._torch = torch
        nested = AutoConfig.from_pretrained(folder).model_type in WITH_TEXT_CONFIG
        auto = AutoModelForImageTextToText if nested else AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self.vocabulary: int = self._model.config.get_text_config().vocab_size

    def probabilities(self, prompt: tuple[int, ...]) -> NDArray[np.float32]:
        """[tokens, vocabulary]: the distribution after each token."""
        if prompt not in self._known:
            with self._torch.no_grad():
                logits = self._model(self._torch.tensor([prompt])).logits[0]
            self._known[prompt] = self._torch.softmax(logits.float(), -1).numpy()
        return self._known[prompt]

    def with_images(self, prompt: tuple[int, ...], arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """The same with prepared images."""
        with self._torch.no_grad():
            inputs = {name: self._torch.from_numpy(array) for name, array in arrays.items()}
            logits = self._model(input_ids=self._torch.tensor([prompt]), **inputs).logits[0]
        result: NDArray[np.float32] = self._torch.softmax(logits.float(), -1).numpy()
        return result
