"""From a checkpoint's settings to the ones mlx-lm is given: rotary embeddings, windows, and what it would misread.

Transformers reads the checkpoint first (its configuration classes, never a checkpoint's own code), so defaults and
spellings of every version are resolved before they are put into mlx-lm's terms: a checkpoint saved by Transformers 5
holds `rope_parameters` and no `rope_theta`, and mlx-lm alone would take its own default without a word.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakuradite.engine.mlx.families import FAMILIES, REFUSED, Family, Settings
from sakuradite.errors import ModelLoadFailedError, UnsupportedModelError

ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act")
CONTEXTS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True, slots=True)
class Translation:
    """What to load: mlx-lm's settings, the family they came from, and how long an input may be."""

    settings: Settings
    model_type: str
    family: Family
    context_length: int | None
    """None where nothing in the model limits it (state-space models)."""
    warnings: tuple[str, ...] = ()


def read_settings(checkpoint: Path) -> Settings:
    """config.json as it is. Raises ModelLoadFailedError when it cannot be read."""
    path = checkpoint / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadFailedError(f"{path} cannot be read: {error}") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise ModelLoadFailedError(f"{path} names no model_type")
    return settings


def translate(checkpoint: Path) -> Translation:
    """The settings for mlx-lm. Raises UnsupportedModelError with the reason when the checkpoint cannot run on MLX."""
    raw = read_settings(checkpoint)
    model_type = raw["model_type"]
    refuse_family(model_type)
    refuse_code(raw)
    refuse_quantization(raw)
    family = FAMILIES[model_type]
    # What Transformers resolved wins; what it dropped (mlx-lm's own keys, such as `quantization`) stays.
    settings: Settings = raw | resolve(checkpoint)
    settings["model_type"] = model_type
    text: Settings = settings["text_config"] if family.nested else settings
    _rotary(text, family)
    _activation(text, family)
    context, warnings = _context(text, family)
    if family.translate is not None:
        family.translate(text)
    return Translation(settings, model_type, family, context, warnings)


def resolve(checkpoint: Path) -> Settings:
    """The settings as Transformers understands them, every default filled in."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UnsupportedModelError(f"the settings of {checkpoint} are not understood: {error}") from None
    found: Settings = config.to_dict()
    return found


def refuse_family(model_type: str) -> None:
    """Raise UnsupportedModelError for a `model_type` that is not on the accepted list, with the reason."""
    if model_type in FAMILIES:
        return
    reason = REFUSED.get(model_type, "it has not been compared with PyTorch")
    raise UnsupportedModelError(f"{model_type} is refused on MLX: {reason}; use backend torch")


def refuse_code(settings: Settings) -> None:
    """Raise UnsupportedModelError where mlx-lm would build the model from a file of the checkpoint."""
    if settings.get("model_file") is not None:
        raise UnsupportedModelError("the checkpoint asks to run its own code (model_file), and that is never done")


def refuse_quantization(settings: Settings) -> None:
    """Raise UnsupportedModelError for packed weights other than MLX's own.

    mlx-lm writes `quantization`, with a copy under `quantization_config`; another library's has a `quant_method`.
    """
    other = settings.get("quantization_config")
    if isinstance(other, dict) and (method := other.get("quant_method")):
        where = "packed MXFP4 runs with native CUDA kernels only" if method == "mxfp4" else "MLX reads its own packing"
        raise UnsupportedModelError(f"weights packed as {method} are refused on MLX: {where}; use backend torch")


def _rotary(settings: Settings, family: Family) -> None:
    """Put the rotary settings under the names mlx-lm reads; refuse what it does not compute as Transformers does."""
    rope = settings.get("rope_parameters")
    if not rope:
        return
    local = rope.get("sliding_attention")
    if isinstance(local, dict):
        if local.get("rope_type", "default") != "default":
            raise _rotary_refused(settings, f"{local['rope_type']} in its sliding layers")
        settings["rope_local_base_freq"] = local["rope_theta"]
        rope = rope["full_attention"]
    kind = rope.get("rope_type", "default")
    if kind not in family.rotary:
        raise _rotary_refused(settings, kind)
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0 and not family.partial:
        raise _rotary_refused(settings, f"partial_rotary_factor {part}")
    if kind == "yarn":
        _check_yarn(settings, rope)
    theta = rope["rope_theta"]
    settings |= {"rope_theta": theta, "partial_rotary_factor": part}
    settings["rope_scaling"] = None if kind == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    if settings["rope_scaling"]:
        settings["rope_scaling"]["type"] = kind


def _check_yarn(settings: Settings, rope: dict[str, Any]) -> None:
    """mlx-lm always rounds YaRN's bounds, and takes its factor on attention from the formula of the paper."""
    if not rope.get("truncate", True):
        raise _rotary_refused(settings, "yarn with truncate: false")
    factor = rope.get("attention_factor")
    if factor is not None and not math.isclose(factor, 0.1 * math.log(rope["factor"]) + 1.0, rel_tol=1e-6):
        raise _rotary_refused(settings, f"yarn with attention_factor {factor}")


def _rotary_refused(settings: Settings, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the rotary embedding of this {settings['model_type']} ({what}) is refused on MLX: mlx-lm does not compute it "
        "as Transformers does, or the two were not compared; use backend torch"
    )


def _activation(settings: Settings, family: Family) -> None:
    """mlx-lm hard-codes each family's activation; another one would be ignored."""
    for key in ACTIVATIONS:
        found = settings.get(key)
        if isinstance(found, str) and found != family.activation:
            raise UnsupportedModelError(
                f"{key} {found} of this {settings['model_type']} is refused on MLX: mlx-lm computes "
                f"{family.activation}; use backend torch"
            )


def _context(settings: Settings, family: Family) -> tuple[int | None, tuple[str, ...]]:
    """How many tokens an input may have, and the warnings where that is less than the checkpoint was built for."""
    built = next((settings[key] for key in CONTEXTS if isinstance(settings.get(key), int)), None)
    limits: list[tuple[int, str]] = []
    window = settings.get("sliding_window")
    kinds = settings.get("layer_types")
    if window and not family.window and (not kinds or "sliding_attention" in kinds):
        limits.append((window, "mlx-lm leaves out its sliding window, which starts to matter there"))
    rope = settings.get("rope_scaling") or {}
    if rope.get("type") == "longrope":
        boundary = rope["original_max_position_embeddings"]
        limits.append((boundary, "mlx-lm has no second set of LongRoPE frequencies for longer inputs"))
    warnings = []
    for limit, reason in limits:
        if built is None or limit < built:
            built = limit
            warnings.append(f"inputs end at {limit} tokens on MLX: {reason}")
    return built, tuple(warnings)
