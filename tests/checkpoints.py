"""Tiny checkpoints for tests: randomly initialised, well under 1 MB, ordinary checkpoint folders, no download.

    build("qwen3", tmp_path / "qwen3")                        config.json, model.safetensors, tokenizer, ChatML template
    build("llama", folder, template="thinking", pad_token=False, adds_bos=True)
    build("gemma3_text", folder, config={"sliding_window": 512}, dtype="bfloat16")

The tokenizer is a byte-level BPE trained on the few sentences below, so it is the same on every run. Weights are drawn
wide (0.3), which makes the answers of different prompts differ clearly.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

type Template = Literal["chatml", "no-system", "thinking", "none"]

SENTENCES = """The support team answers questions about billing, shipping and returns. Is this urgent? Yes or no.
Question: Options: Answer: Text: the customer was charged twice and wants a refund before Friday. A. B. C. D. 1 2 3 4 5
positive negative neutral true false low high system user assistant You are a helpful assistant. Which option fits?"""

_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES: dict[Template, str | None] = {
    "chatml": _TURNS,
    "no-system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _TURNS,
    "thinking": _TURNS
    + "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}{% endif %}",
    "none": None,
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "<think>", "</think>"]

_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_GEMMA: dict[str, Any] = {"sliding_window": 16, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}

LONGROPE_BOUNDARY = 64  # tokens; phi3 below changes its rotary frequencies for longer inputs

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
    "glm4": {},
    "cohere2": {"sliding_window": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "ministral3": {},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"num_hidden_layers": 6},
    "phi3": {
        "original_max_position_embeddings": LONGROPE_BOUNDARY,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": LONGROPE_BOUNDARY,
        },
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024, "num_key_value_heads": 4},
    "gpt_neox": {"num_key_value_heads": 4},
    "qwen3_moe": _EXPERTS | {"moe_intermediate_size": 32, "norm_topk_prob": True},
    "olmoe": _EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_ff_dim": 64,
        "conv_L_cache": 3,
    },
    "qwen3_next": _HYBRID | _EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _HYBRID,
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "hybrid_override_pattern": "M-*M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 8,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": _MAMBA,
    "bamba": _MAMBA | {"attn_layer_indices": [1], "mamba_expand": 1},
    "granitemoehybrid": _MAMBA
    | {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
        "mamba_expand": 1,
        "layer_types": ["mamba", "attention"],
    },
}
"""Text architectures by `model_type`, with what their configuration needs beyond the common small sizes."""


def build(
    architecture: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    template: Template = "chatml",
    pad_token: bool = True,
    adds_bos: bool = False,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder and return it. `config` overrides settings; the same arguments give the same files.

    `adds_bos`: the tokenizer puts `<s>` before every text it encodes. `template="none"`: a base model without one.
    """
    from tests.picturing import PICTURED, build_pictured

    if architecture in PICTURED:
        return build_pictured(architecture, folder, seed=seed)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _tokenizer(pad_token, adds_bos)
    tokenizer.chat_template = TEMPLATES[template]
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.3,
    }
    described = AutoConfig.for_model(architecture, **(settings | ARCHITECTURES.get(architecture, {}) | (config or {})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(described).float().eval()
        with torch.no_grad():
            for weight in model.parameters():  # some projections start at zero and would hide what feeds them
                if weight.dim() > 1 and not weight.any():
                    weight.normal_(0.0, 0.3)
            for name, buffer in model.named_buffers():  # so do the biases by which experts are chosen
                if name.endswith("_bias"):
                    buffer.normal_(0.0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(with_legacy_rope(json.loads(path.read_text())), indent=2) + "\n")
    return folder


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL_TOKENS, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(SENTENCES.splitlines(), trainer)
    text: str = tokenizer.to_str()
    return text


def _tokenizer(pad_token: bool, adds_bos: bool) -> Any:
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(_trained())
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", SPECIAL_TOKENS.index("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if adds_bos else "<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        padding_side="right",
        **({"pad_token": "<|endoftext|>"} if pad_token else {}),
    )


def with_legacy_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings once more under their names of Transformers 4, as checkpoints on the hub have them."""
    legacy: dict[str, Any] = {}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        legacy["rope_theta"] = rope["rope_theta"]
        legacy["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
        if rope.get("rope_type", "default") != "default":
            legacy["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"} | {"type": rope["rope_type"]}
    elif isinstance(rope, dict) and "full_attention" in rope:
        legacy["rope_theta"] = rope["full_attention"]["rope_theta"]
        legacy["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    match config["model_type"]:
        case "lfm2":
            legacy["block_dim"] = config["hidden_size"]
        case "gpt2":
            legacy["n_ctx"] = config["n_positions"]
        case "gpt_neox":
            legacy |= {"rotary_emb_base": legacy["rope_theta"], "rotary_pct": legacy["partial_rotary_factor"]}
    return legacy | config
