"""What a GGUF file's metadata and tensors are called in an ordinary checkpoint: the config and the weights' names.

llama.cpp's names go in, Transformers' come out, for the families whose layout was checked; others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakuradite.errors import UnsupportedModelError

# architecture of the file -> (class, model_type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QUERY_KEY_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
BIASES = ("attn_q", "attn_k", "attn_v")
ROPE_FACTORS = "rope_freqs.weight"


def names(architecture: str, layers: int, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Checkpoint name by tensor name, for every tensor that a plain model of this architecture has."""
    wanted = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if "output.weight" in tensors:
        wanted["output.weight"] = "lm_head.weight"
    table = LAYER | QUERY_KEY_NORMS if architecture == "qwen3" else LAYER
    for i in range(layers):
        for old, new in table.items():
            wanted[f"blk.{i}.{old}.weight"] = f"model.layers.{i}.{new}.weight"
        if architecture == "qwen2":
            for old in BIASES:
                wanted[f"blk.{i}.{old}.bias"] = f"model.layers.{i}.{LAYER[old]}.bias"
    return wanted


def arranged(architecture: str, fields: Mapping[str, Any], name: str, weight: NDArray[Any]) -> NDArray[Any]:
    """A tensor in the order Transformers expects: llama's query and key rows have their rotary halves interleaved."""
    if architecture != "llama" or not name.startswith("blk.") or name.split(".")[2] not in ("attn_q", "attn_k"):
        return weight
    query = name.split(".")[2] == "attn_q"
    heads = fields[f"llama.attention.head_count{'' if query else '_kv'}"]
    return weight.reshape(heads, len(weight) // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def refusal(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> str | None:
    """Why a model of this metadata and these tensors cannot be converted; None when it can.

    A tensor that is missing would be filled with random numbers by a loader, one that is not read would change what the
    model computes: neither may pass.
    """
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        return f"its architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}"
    if fields.get(f"{architecture}.expert_count"):
        return "it is a mixture of experts"
    if fields.get(f"{architecture}.rope.scaling.type", "none") != "none":
        return f"its rotary scaling {fields[f'{architecture}.rope.scaling.type']!r} is not handled"
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        if f"{architecture}.{key}" not in fields:
            return f"its metadata lacks {architecture}.{key}"
    heads = fields[f"{architecture}.attention.head_count"]
    head = fields.get(f"{architecture}.attention.key_length", fields[f"{architecture}.embedding_length"] // heads)
    if fields.get(f"{architecture}.rope.dimension_count", head) != head:
        return "it rotates only a part of each head"
    wanted = names(architecture, fields[f"{architecture}.block_count"], tensors).keys()
    if missing := wanted - tensors.keys():
        return f"its tensor {min(missing)!r} is missing"
    if extra := tensors.keys() - wanted - {ROPE_FACTORS}:
        return f"{min(extra)!r} is no tensor of a plain {architecture} model"
    return None


def config(
    fields: Mapping[str, Any], tensors: Mapping[str, Any], dtype: str, rope_factors: NDArray[Any] | None
) -> dict[str, Any]:
    """The contents of config.json."""
    architecture = fields["general.architecture"]
    class_name, model_type = ARCHITECTURES[architecture]

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    heads = get("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    theta = float(get("rope.freq_base", 10000.0))
    values: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        # stored as float32: 1e-5 comes back as 9.99999975e-06
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon', 1e-6):.6g}"),
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    if rope_factors is not None:
        values["rope_scaling"] = llama3_scaling(rope_factors, theta, head_dim)
    return values


def llama3_scaling(factors: NDArray[Any], theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rotary scaling, recovered from the factor that the file stores for each frequency.

    The file keeps the result of the formula, not its parameters. The largest factor is `factor`, the others are the
    same in every release; the formula must give back every stored number, or the file is refused.
    """
    low, high, original, factor = 1.0, 4.0, 8192, float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModelError("this GGUF file is refused: its rotary factors do not follow Llama 3's formula")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
