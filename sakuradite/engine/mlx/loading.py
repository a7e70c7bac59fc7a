"""Loads a checkpoint through mlx-lm's own classes: safetensors, settings translated, no code of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakuradite.config import ModelConfig
from sakuradite.engine.mlx import runtime
from sakuradite.engine.mlx.families import Settings
from sakuradite.engine.mlx.translation import Translation, read_settings, refuse_family, translate
from sakuradite.errors import InsufficientResourcesError, ModelLoadFailedError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory with its weights evaluated, and what is known about it."""

    model: Any
    translation: Translation
    device: str
    dtype: str
    packed: bool
    """Weights in MLX's own quantised packing."""
    parameters: int
    weight_bytes: int


def load_text(config: ModelConfig, checkpoint: Path) -> Loaded:
    """The model of a checkpoint folder.

    Raises MissingExtraError, UnsupportedModelError (with the reason), ModelLoadFailedError (damaged or missing weights)
    or InsufficientResourcesError (no Apple GPU, not enough memory).
    """
    runtime.require("mlx-lm", runtime.MINIMUM_MLX_LM)
    model_type = read_settings(checkpoint)["model_type"]
    refuse_family(model_type)
    runtime.refuse_old_qwen3_5(model_type)
    translation = translate(checkpoint)
    device = runtime.choose_device(config.device)
    utils = runtime.library("mlx_lm.utils")
    family = translation.family

    def classes(config: Settings) -> tuple[type, type]:
        model_class, arguments = utils._get_classes(config=config)
        return (model_class if family.rename is None else _renaming(model_class, family.rename)), arguments

    try:
        model, _ = utils.load_model(checkpoint, model_config=translation.settings, get_model_classes=classes)
    except FileNotFoundError as error:
        raise ModelLoadFailedError(f"{checkpoint} holds no model*.safetensors: {error}") from None
    except Exception as error:
        raise _refusal(error, translation.model_type) from error
    packed = "quantization" in translation.settings
    _cast(model, config.dtype)
    return Loaded(
        model,
        translation,
        device,
        weight_dtype(model),
        packed,
        int(utils.get_total_parameters(model)),
        weight_bytes(model),
    )


def _refusal(error: Exception, model_type: str) -> Exception:
    """mlx-lm raises ValueError for weights that do not fit the settings, TypeError for settings it lacks."""
    if runtime.is_out_of_memory(error):
        return InsufficientResourcesError(f"the weights do not fit this machine's memory: {error}")
    if isinstance(error, ValueError | TypeError | KeyError):
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return UnsupportedModelError(
            f"mlx-lm's {model_type} does not take this checkpoint ({first}); use backend torch"
        )
    return ModelLoadFailedError(f"mlx-lm could not load the weights: {error}")


def _renaming(model_class: Any, rename: Callable[[str], str]) -> Any:
    """The model class, its weights renamed before its own preparation of them."""

    class Renaming(model_class):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            prepared: dict[str, Any] = super().sanitize({rename(name): weight for name, weight in weights.items()})
            return prepared

    return Renaming


def _cast(model: Any, dtype: str) -> None:
    """Give the floating-point weights the wanted type; `auto` keeps the checkpoint's. Packed weights stay packed."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    if dtype == "auto":
        return
    wanted = getattr(mx, dtype)
    keep = getattr(model, "cast_predicate", lambda _: True)
    model.update(
        tree_map_with_path(
            lambda path, w: w.astype(wanted) if mx.issubdtype(w.dtype, mx.floating) and keep(path) else w,
            model.parameters(),
        )
    )
    mx.eval(model.parameters())


def weight_dtype(model: Any) -> str:
    """The type that most floating-point weights have: float32, bfloat16 or float16."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    sizes: dict[str, int] = {}
    for _, weight in tree_flatten(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            name = str(weight.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + weight.size
    return max(sizes, key=lambda name: sizes[name])


def weight_bytes(model: Any) -> int:
    """Bytes of all weights in memory."""
    from mlx.utils import tree_flatten

    return sum(int(weight.nbytes) for _, weight in tree_flatten(model.parameters()))
