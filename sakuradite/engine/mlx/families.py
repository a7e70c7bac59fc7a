"""Which architectures run on MLX, what each needs on the way, and which are refused and why.

One table, iterated by the tests (each accepted family is compared with PyTorch in float32) and printed in docs/mlx.md.
mlx-lm reads its own names from a checkpoint's settings and silently ignores what it does not know, so a family is
accepted for the rotary types, activations and windows that were compared, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sakuradite.errors import UnsupportedModelError

type Settings = dict[str, Any]

PLAIN = frozenset({"default"})
SCALED = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, slots=True)
class Family:
    """One accepted `model_type`."""

    activation: str = "silu"
    rotary: frozenset[str] = PLAIN
    """Rotary types that mlx-lm computes as Transformers does."""
    partial: bool = False
    """mlx-lm honours a rotary embedding over a part of the head."""
    window: bool = False
    """mlx-lm applies the sliding window; where it does not, the context ends where the window does."""
    translate: Callable[[Settings], None] | None = None
    """Changes the settings, as Transformers resolved them, into mlx-lm's terms. May raise UnsupportedModelError."""
    rename: Callable[[str], str] | None = None
    """A weight's name in mlx-lm, where its own loader does not find it."""
    nested: bool = False
    """The text model's settings are under `text_config`; mlx-lm loads the text part alone."""
    images: bool = False
    """Reads images, through mlx-vlm."""
    mended: bool = False
    """mlx-lm computes parts of it otherwise: the function of this name in `mending` puts them right after loading."""
    exact_embedding_scale: bool = False
    """mlx-lm rounds the factor on the embeddings to bfloat16; float32 weights get the exact one."""


def _window_pattern(settings: Settings) -> None:
    """mlx-lm wants one full-attention layer every so many; Transformers lists the kind of each layer."""
    kinds = settings["layer_types"]
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    if not period or any((kind == "full_attention") != (i % period == period - 1) for i, kind in enumerate(kinds)):
        raise UnsupportedModelError(
            f"mlx-lm cannot lay out this order of layers of {settings['model_type']}: one full attention layer must "
            "come at the end of each equal run; use backend torch"
        )
    settings["sliding_window_pattern"] = period


def _exaone4(settings: Settings) -> None:
    kinds = settings["layer_types"]
    local = {"sliding_attention": "L", "full_attention": "G"}
    letters = "".join(local[kind] for kind in kinds)
    settings["sliding_window_pattern"] = letters if "L" in letters else None


def _phi3(settings: Settings) -> None:
    """mlx-lm has only LongRoPE's frequencies for long inputs; Transformers takes the short ones up to the boundary.

    The short ones are put in their place, and the context ends at the boundary.
    """
    scaling = settings["rope_scaling"]
    if scaling:
        settings["rope_scaling"] = scaling | {"long_factor": scaling["short_factor"]}
        settings["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]


def _granitemoehybrid(settings: Settings) -> None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    settings["layer_types"] = [names.get(kind, kind) for kind in settings["layer_types"]]
    settings["position_embedding_type"] = settings.get("position_embedding_type") or "nope"


def _nemotron_h(settings: Settings) -> None:
    """Transformers clamps the time step at `time_step_min`; mlx-lm at `time_step_limit`, which says 0."""
    settings["time_step_limit"] = [settings["time_step_min"], float("inf")]


def _qwen3_moe(settings: Settings) -> None:
    settings["num_experts"] = settings["num_local_experts"]


def _lfm2(settings: Settings) -> None:
    settings["block_dim"] = settings["hidden_size"]


def _gpt2(settings: Settings) -> None:
    settings["n_ctx"] = settings["n_positions"]


def _apertus(settings: Settings) -> None:
    settings |= {"mlp_bias": False, "post_norm": False, "qk_norm": True}


def _qwen3_5_text(settings: Settings) -> None:
    """mlx-lm knows the multimodal wrapper's name alone; settings without a `text_config` are the text model's."""
    settings["model_type"] = "qwen3_5"


def _stablelm(settings: Settings) -> None:
    settings.setdefault("norm_eps", settings["layer_norm_eps"])


def _gpt_neox(settings: Settings) -> None:
    settings |= {"rotary_emb_base": settings["rope_theta"], "rotary_pct": settings["partial_rotary_factor"]}


def _hunyuan(settings: Settings) -> None:
    """Its "dynamic" frequencies are fixed by `alpha`; without it they would change with the input's length."""
    if settings["rope_scaling"] and not settings["rope_scaling"].get("alpha"):
        raise UnsupportedModelError(
            "the rotary embedding of this hunyuan_v1_dense (dynamic without alpha) is refused on MLX; use backend torch"
        )


FAMILIES: Mapping[str, Family] = {
    "apertus": Family("xielu", rotary=frozenset({"default", "llama3"}), translate=_apertus),
    "cohere": Family(),
    "cohere2": Family(window=True, translate=_window_pattern),
    "deepseek_v2": Family(rotary=frozenset({"yarn"})),
    "deepseek_v3": Family(rotary=frozenset({"default", "yarn"})),
    "dots1": Family(),
    "ernie4_5": Family(),
    "exaone4": Family(window=True, translate=_exaone4),
    "falcon_h1": Family(),
    "falcon_mamba": Family(),
    "gemma": Family("gelu_pytorch_tanh", mended=True),
    "gemma2": Family("gelu_pytorch_tanh"),
    "gemma3_text": Family("gelu_pytorch_tanh", window=True, translate=_window_pattern, exact_embedding_scale=True),
    "glm": Family(partial=True, mended=True),
    "glm4": Family(partial=True),
    "glm4_moe": Family(partial=True),
    "glm4_moe_lite": Family(),
    "gpt2": Family("gelu_new", translate=_gpt2, rename=lambda name: name.removeprefix("transformer.")),
    "gpt_neox": Family("gelu", partial=True, translate=_gpt_neox, mended=True),
    "granite": Family(rotary=SCALED),
    "granitemoe": Family(),
    "granitemoehybrid": Family(translate=_granitemoehybrid),
    "helium": Family(),
    "hunyuan_v1_dense": Family(rotary=frozenset({"default", "dynamic"}), translate=_hunyuan),
    "idefics3": Family(nested=True, images=True),
    "jamba": Family(mended=True),
    "lfm2": Family(translate=_lfm2),
    "lfm2_moe": Family(translate=_lfm2),
    "lfm2_vl": Family(translate=_lfm2, nested=True, images=True),
    "llama": Family(rotary=SCALED),
    "mamba": Family(),
    "mamba2": Family(),
    "ministral3": Family(rotary=frozenset({"yarn"})),
    "mistral": Family(rotary=SCALED),
    "mixtral": Family(),
    "nemotron": Family("relu2", partial=True),
    "nemotron_h": Family("relu2", translate=_nemotron_h),
    "olmo2": Family(rotary=SCALED),
    "olmo3": Family(window=True),
    "olmoe": Family(),
    "phi": Family("gelu_new", partial=True),
    "phi3": Family(rotary=frozenset({"default", "longrope"}), partial=True, translate=_phi3),
    "qwen2": Family(rotary=SCALED),
    "qwen2_moe": Family(),
    "qwen3": Family(rotary=SCALED),
    "qwen3_5": Family(partial=True, nested=True),
    "qwen3_5_text": Family(partial=True, translate=_qwen3_5_text),
    "qwen3_moe": Family(translate=_qwen3_moe),
    "qwen3_next": Family(partial=True),
    "seed_oss": Family(rotary=SCALED),
    "smollm3": Family(rotary=SCALED),
    "smolvlm": Family(nested=True, images=True),
    "stablelm": Family(partial=True, translate=_stablelm),
    "starcoder2": Family("gelu_pytorch_tanh", mended=True),
}
"""Accepted families by `model_type`."""

WRONG_FOR_QWEN3_5 = (0, 31, 3)  # the last mlx-lm with the defect in its recurrent q/k normalisation

OTHER_IMAGES = "on MLX only SmolVLM, Idefics3 and LFM2-VL read images"
REFUSED: Mapping[str, str] = {
    "bamba": "mlx-lm has no implementation of it",
    "ernie4_5_moe": "mlx-lm's router leaves out the correction bias by which the model chooses its experts",
    "aya_vision": OTHER_IMAGES,
    "gemma3": OTHER_IMAGES,
    "gemma3n": OTHER_IMAGES,
    "gemma4": OTHER_IMAGES,
    "gpt_bigcode": "mlx-lm's implementation does not start (it calls mx.random.uniform with wrong arguments)",
    "gpt_oss": "mlx-lm rounds the YaRN bounds that the model leaves as they are (truncate: false), and packed MXFP4 "
    "runs with native CUDA kernels only",
    "idefics2": OTHER_IMAGES,
    "internvl": OTHER_IMAGES,
    "llama4": OTHER_IMAGES,
    "llava": OTHER_IMAGES,
    "llava_next": OTHER_IMAGES,
    "mistral3": OTHER_IMAGES,
    "mllama": OTHER_IMAGES,
    "nanochat": "mlx-lm does not find the weights by the names that Transformers saves them under",
    "olmo": "mlx-lm's implementation needs the package ai2-olmo",
    "olmo_hybrid": "mlx-lm does not find the weights by the names that Transformers saves them under",
    "paligemma": OTHER_IMAGES,
    "pixtral": OTHER_IMAGES,
    "qwen2_5_vl": OTHER_IMAGES,
    "qwen2_vl": OTHER_IMAGES,
    "qwen3_5_moe": "mlx-lm does not find the weights of its experts by the names that Transformers saves them under",
    "qwen3_vl": OTHER_IMAGES,
    "qwen3_vl_moe": OTHER_IMAGES,
}
"""Families that one could expect here and that are refused: `model_type` to the reason."""
