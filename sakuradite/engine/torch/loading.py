"""From a checkpoint folder to a Transformers model on its device: safetensors only, no repository code."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakuradite.errors import InsufficientResourcesError, ModelLoadFailedError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONTEXT_SETTINGS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
UNBOUNDED_CONTEXT = 1 << 20  # tokens, for recurrent checkpoints that state no limit


def read_config(checkpoint: Path) -> Any:
    """The Transformers configuration of a checkpoint folder.

    Raises UnsupportedModelError when the folder's architecture has no native class, or relies on code of its own.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = checkpoint / "config.json"
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadFailedError(f"{path}: {type(error).__name__}; the folder holds no readable checkpoint") from None
    name = described.get("model_type")
    try:
        return AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        own = " and brings code of its own, which is never run" if "auto_map" in described else ""
        raise UnsupportedModelError(f"model type {name!r} is not known to this Transformers{own}") from error
    except (StrictDataclassError, TypeError) as error:  # a value of the wrong type or out of its range
        raise UnsupportedModelError(f"{path} is not understood by this Transformers: {error}") from error


def check_supported(config: Any, device: torch.device) -> None:
    """Raise UnsupportedModelError for what cannot be loaded natively: no causal language model, MXFP4 off CUDA."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not reads_images(config):
        raise UnsupportedModelError(f"model type {config.model_type!r} has no causal language model in Transformers")
    if quantization(config) == "mxfp4" and (missing := missing_for_mxfp4(device)):
        raise UnsupportedModelError(
            f"packed MXFP4 weights run only with native kernels on CUDA, and here {missing}; "
            "they are not unpacked silently, which would take four times the memory"
        )


def reads_images(config: Any) -> bool:
    """Whether Transformers has a model of images and text for a configuration that describes a vision part."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    described = getattr(config, "vision_config", None) is not None
    return described and config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def quantization(config: Any) -> str | None:
    """The quantisation method that a checkpoint was stored with, if any."""
    described = getattr(config, "quantization_config", None)
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else described.quant_method
    return str(getattr(method, "value", method))


def missing_for_mxfp4(device: torch.device) -> str | None:
    """What native MXFP4 needs and is not here: CUDA with compute capability 7.5, Triton, `kernels`."""
    import torch

    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "the GPU's compute capability is below 7.5"
    for package in ("triton", "kernels"):
        if find_spec(package) is None:
            return f"the package {package!r} is not installed"
    return None


def stored_dtype(config: Any) -> str | None:
    """The dtype that the configuration names for its weights, as "bfloat16"."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def context_length(config: Any) -> int:
    """Tokens that the checkpoint was built for."""
    text = config.get_text_config()
    for name in CONTEXT_SETTINGS:
        if isinstance(value := getattr(text, name, None), int) and value > 0:
            return value
    return UNBOUNDED_CONTEXT


def weight_file_bytes(checkpoint: Path) -> int:
    """Bytes of the files that hold the weights."""
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def load_model(checkpoint: Path, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model in inference mode on its device.

    Raises InsufficientResourcesError when it does not fit, ModelLoadFailedError when files are missing or broken.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    weights = weight_file_bytes(checkpoint)
    if not weights:
        raise ModelLoadFailedError(f"{checkpoint} holds no *.safetensors file; other weight formats are not read")
    options: dict[str, Any] = {"dtype": dtype, "config": config}
    if device.type != "cpu" and find_spec("accelerate") is not None:
        options["device_map"] = {"": device}  # straight to the device, without a second copy in main memory
    try:
        loader = AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM
        model = loader.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=False, use_safetensors=True, **options
        )
        model = model.eval().requires_grad_(False)
        return model if "device_map" in options or device.type == "cpu" else model.to(device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise InsufficientResourcesError(f"{weights / 2**30:.1f} GiB of weights do not fit on {device}") from error
    except ImportError as error:
        raise UnsupportedModelError(f"the checkpoint needs a package that is not installed: {error}") from error
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelLoadFailedError(f"Transformers could not load the checkpoint: {error}") from error
