"""Loads a checkpoint by the classes of mlx-lm and mlx-vlm: safetensors, settings translated, none of its own code."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakuradite.config import ModelConfig
from sakuradite.engine.mlx import mending, runtime
from sakuradite.engine.mlx.families import Settings
from sakuradite.engine.mlx.translation import Translation, read_settings, translate
from sakuradite.errors import InsufficientResourcesError, ModelLoadFailedError, UnsupportedModelError

MESSAGE_CHARACTERS = 300  # of the library's own words, which can list every weight


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


def load_checkpoint(config: ModelConfig, checkpoint: Path) -> Loaded:
    """The model of a checkpoint folder.

    Raises MissingExtraError, UnsupportedModelError (with the reason), ModelLoadFailedError (damaged or missing weights)
    or InsufficientResourcesError (no Apple GPU, not enough memory).
    """
    model_type = read_settings(checkpoint)["model_type"]
    runtime.require_for(model_type)
    translation = translate(checkpoint)
    if translation.family.images:
        runtime.require("mlx-vlm", runtime.MINIMUM_MLX_VLM)
    device = runtime.choose_device(config.device)
    try:
        model = (_vision_model if translation.family.images else _text_model)(translation, checkpoint)
    except FileNotFoundError as error:
        raise ModelLoadFailedError(f"{checkpoint} holds no model*.safetensors: {error}") from None
    except Exception as error:
        raise _refusal(error, translation.model_type) from error
    packed = "quantization" in translation.settings
    _cast(model, "float32" if config.dtype == "auto" and device == "cpu" and not packed else config.dtype)
    return Loaded(
        model,
        translation,
        device,
        weight_dtype(model),
        packed,
        int(runtime.library("mlx_lm.utils").get_total_parameters(model)),
        weight_bytes(model),
    )


def _text_model(translation: Translation, checkpoint: Path) -> Any:
    utils = runtime.library("mlx_lm.utils")
    rename = translation.family.rename

    def classes(config: Settings) -> tuple[type, type]:
        model_class, arguments = utils._get_classes(config=config)
        return (model_class if rename is None else _renaming(model_class, rename)), arguments

    model, _ = utils.load_model(checkpoint, model_config=translation.settings, get_model_classes=classes)
    if translation.family.mended:
        getattr(mending, translation.model_type)(model, translation.settings)
    return model


def _vision_model(translation: Translation, checkpoint: Path) -> Any:
    """mlx-vlm reads a folder alone, so it is given one with the translated settings beside the checkpoint's weights."""
    utils = runtime.library("mlx_vlm.utils")
    runtime.library(f"mlx_vlm.models.{translation.model_type}")  # or it would be imported unshielded below
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(translation.settings), encoding="utf-8")
        for file in (*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.safetensors.index.json")):
            (folder / file.name).symlink_to(file.resolve())
        return utils.load_model(folder)


def _refusal(error: Exception, model_type: str) -> Exception:
    """mlx-lm and mlx-vlm raise ValueError for weights that do not fit the settings, TypeError for settings it lacks."""
    if runtime.is_out_of_memory(error):
        return InsufficientResourcesError(f"the weights do not fit this machine's memory: {error}")
    if isinstance(error, ValueError | TypeError | KeyError):
        said = " ".join(str(error).split())[:MESSAGE_CHARACTERS] or type(error).__name__
        return UnsupportedModelError(f"MLX's {model_type} does not take this checkpoint ({said}); use backend torch")
    return ModelLoadFailedError(f"MLX could not load the weights: {error}")


def _renaming(model_class: Any, rename: Callable[[str], str]) -> Any:
    """The model class, its weights renamed before its own preparation of them."""

    class Renaming(model_class):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            prepared: dict[str, Any] = super().sanitize({rename(name): weight for name, weight in weights.items()})
            return prepared

    return Renaming


def _cast(model: Any, dtype: str) -> None:
    """Give the floating-point weights the wanted type; `auto` keeps the checkpoint's. Packed weights stay packed.

    On a CPU the caller widens `auto` to float32, which loses nothing: MLX's bfloat16 there took 12 times as long.
    """
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
