"""Tiny checkpoints of image and text models, with their processors' files. See `tests.checkpoints.build`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.checkpoints import ARCHITECTURES, SENTENCES, with_legacy_rope

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|image_start|>",
    "<|image_end|>", "<|img_thumbnail|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
    *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)),
    *(f"<|img_row_{r}_col_{c}|>" for r in range(1, 4) for c in range(1, 4)),
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PATCHES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION = _PATCHES | {"image_size": 28, "patch_size": 7, "initializer_range": 0.3}


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


def _tokenizer(placeholder: str, **tokens: str) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        padding_side="right",
        extra_special_tokens=tokens or None,
    )
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    return tokenizer


def _id(token: str) -> int:
    """The special tokens are the first entries of the vocabulary."""
    return SPECIAL_TOKENS.index(token)


def _text(kind: str, **more: Any) -> dict[str, Any]:
    sizes = {
        "model_type": kind,
        "vocab_size": len(_tokenizer("")),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": _id("<|im_start|>"),
        "eos_token_id": _id("<|im_end|>"),
        "pad_token_id": _id("<|endoftext|>"),
    }
    return sizes | ARCHITECTURES.get(kind, {}) | more


def _qwen(text: str, vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    eyes = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "initializer_range": 0.3,
    }  # fmt: skip
    return {
        "text_config": _text(text, rope_parameters=rope, **more),
        "vision_config": eyes | vision,
        "image_token_id": _id("<|image_pad|>"),
        "video_token_id": _id("<|video_pad|>"),
        "vision_start_token_id": _id("<|vision_start|>"),
        "vision_end_token_id": _id("<|vision_end|>"),
        "tie_word_embeddings": False,
    }


def _settings(architecture: str) -> dict[str, Any]:
    image = _id("<image>")
    match architecture:
        case "smolvlm" | "idefics3":
            return {
                "text_config": _text("llama"),
                "vision_config": _VISION,
                "image_token_id": image,
                "scale_factor": 2,
                "pad_token_id": _id("<|endoftext|>"),
                "tie_word_embeddings": False,
            }
        case "lfm2_vl":
            eyes = {"model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 64, "vision_use_head": False}
            return {
                "text_config": _text("lfm2", tie_word_embeddings=True),
                "vision_config": _PATCHES | eyes,
                "image_token_id": image,
                "downsample_factor": 2,
                "projector_hidden_size": 32,
                "tie_word_embeddings": True,
            }
        case "qwen2_5_vl":
            return _qwen("qwen2_5_vl_text", {"fullatt_block_indexes": [1], "window_size": 16})
        case "qwen3_vl":
            return _qwen("qwen3_vl_text", {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]})
        case "qwen3_5":
            return _qwen("qwen3_5_text", {"num_position_embeddings": 64, "deepstack_visual_indexes": []})
        case "llava":
            return {
                "text_config": _text("llama"),
                "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
                "image_token_index": image,
                "image_token_id": image,
                "image_seq_length": 16,
                "vision_feature_layer": -2,
            }
        case "gemma3":
            soft = _id("<image_soft_token>")
            return {
                "text_config": _text("gemma3_text"),
                "vision_config": _VISION | {"model_type": "siglip_vision_model"},
                "mm_tokens_per_image": 4,
                "image_token_id": soft,
                "image_token_index": soft,
                "boi_token_index": _id("<start_of_image>"),
                "eoi_token_index": _id("<end_of_image>"),
            }
    raise KeyError(architecture)


def _processor(architecture: str) -> Any:
    import transformers as t

    match architecture:
        case "smolvlm" | "idefics3":
            name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[architecture]
            tokens = {
                "image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
                "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
            }  # fmt: skip
            sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
            parts = {"image_processor": getattr(t, f"{name}ImageProcessor")(**sizes)}
            if architecture == "smolvlm":
                parts["video_processor"] = t.SmolVLMVideoProcessor(
                    size={"longest_edge": 28}, max_image_size={"longest_edge": 28}
                )
            return getattr(t, f"{name}Processor")(tokenizer=_tokenizer("<image>", **tokens), image_seq_len=4, **parts)
        case "lfm2_vl":
            eyes = t.Lfm2VlImageProcessor(
                downsample_factor=2, encoder_patch_size=4, min_image_tokens=4, max_image_tokens=16, tile_size=32,
                max_tiles=4, min_tiles=2, do_image_splitting=False, max_num_patches=64,
            )  # fmt: skip
            tokens = {
                "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
                "image_thumbnail_token": "<|img_thumbnail|>",
            }  # fmt: skip
            return t.Lfm2VlProcessor(image_processor=eyes, tokenizer=_tokenizer("<image>", **tokens))
        case "qwen2_5_vl" | "qwen3_vl" | "qwen3_5":
            grid = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
            eyes = t.Qwen2VLImageProcessor(size={"shortest_edge": 64, "longest_edge": 1024}, **grid)
            tokens = {
                "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
                "vision_eos_token": "<|vision_end|>",
            }  # fmt: skip
            old = architecture == "qwen2_5_vl"
            return (t.Qwen2_5_VLProcessor if old else t.Qwen3VLProcessor)(
                image_processor=eyes,
                tokenizer=_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", **tokens),
                video_processor=(t.Qwen2VLVideoProcessor if old else t.Qwen3VLVideoProcessor)(**grid),
            )
        case "llava":
            return t.LlavaProcessor(
                image_processor=t.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
                tokenizer=_tokenizer("<image>", image_token="<image>"),
                patch_size=7,
                vision_feature_select_strategy="default",
                num_additional_image_tokens=1,
            )
        case "gemma3":
            tokens = {
                "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"
            }  # fmt: skip
            return t.Gemma3Processor(
                image_processor=t.Gemma3ImageProcessor(size={"height": 28, "width": 28}, do_pan_and_scan=False),
                tokenizer=_tokenizer("<start_of_image>", **tokens),
                image_seq_length=4,
            )
    raise KeyError(architecture)


PICTURED = ("smolvlm", "idefics3", "lfm2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "gemma3")
"""Image and text architectures by `model_type`."""


def build_pictured(
    architecture: str,
    folder: Path,
    *,
    seed: int = 0,
    template: str | None = None,
    vision: dict[str, Any] | None = None,
    tokens_per_image: int | None = None,
) -> Path:
    """Write a checkpoint folder and return it.

    `template`: another chat template, in which IMAGE is the placeholder. `vision`: settings of the vision tower; the
    processor keeps its own. `tokens_per_image`: of Gemma 3, which takes their number from its configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    chosen = _settings(architecture)
    chosen["vision_config"] = chosen["vision_config"] | (vision or {})
    if architecture == "gemma3" and tokens_per_image is not None:
        chosen["mm_tokens_per_image"] = tokens_per_image
    described = AutoConfig.for_model(architecture, **chosen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(described).float().eval()
        with torch.no_grad():
            for weight in model.parameters():  # some projections start at zero and would hide the image
                if weight.dim() > 1 and not weight.any():
                    weight.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    processor = _processor(architecture)
    processor.chat_template = template or processor.tokenizer.chat_template
    processor.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["text_config"] = with_legacy_rope(settings["text_config"])
    path.write_text(json.dumps(settings, indent=2) + "\n")
    return folder
