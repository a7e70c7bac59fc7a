"""Whether each runtime that is installed here can load a checkpoint, from its settings alone, and why not."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from sakuradite.errors import APIError, MissingExtraError, UnsupportedModelError
from sakuradite.hub.registry import transformers_registry
from sakuradite.hub.safety import CUSTOM_CODE
from sakuradite.operations import BackendSupport


def backends(config: Mapping[str, Any], refusal: str | None) -> dict[str, BackendSupport]:
    """For each backend whether it can load the checkpoint here. `refusal` is what both refuse it for already."""
    found = {}
    for name, check in (("torch", _torch), ("mlx", _mlx)):
        reason = refusal or check(config)
        found[name] = BackendSupport(supported=reason is None, reason=reason)
    return found


def resolved(config: Mapping[str, Any]) -> Any:
    """The settings as Transformers understands them, with the defaults that config.json leaves out; None where
    Transformers is not installed or does not know the model.
    """
    registry = transformers_registry()
    if registry is None or config.get("model_type") not in registry.known:
        return None
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError, OSError):
            return None  # its own classes do not understand it; `_torch` says so


def prefix_reuse(config: Mapping[str, Any], dtype: str | None) -> str:
    """Which reuse of a shared prefix the settings allow on PyTorch, in a sentence; loading also probes it."""
    if not _installed("torch", "transformers"):
        return "not known here: deciding it needs the extra [torch]"
    if (settings := resolved(config)) is None:
        return "not known: Transformers has no settings for this model"
    import torch

    from sakuradite.engine.torch.eligibility import decide

    kind = getattr(torch, dtype or "", None)
    decision = decide(settings.get_text_config(), kind if isinstance(kind, torch.dtype) else torch.float32, True)
    return f"{decision.layout}: {decision.reason}"


def _torch(config: Mapping[str, Any]) -> str | None:
    model_type = str(config.get("model_type", ""))
    registry = transformers_registry()
    if registry is None or not _installed("torch"):
        return str(MissingExtraError("the PyTorch backend", "torch"))
    if model_type not in registry.known:
        unknown = f"Transformers {registry.version} does not know the model type {model_type!r}"
        return CUSTOM_CODE if config.get("auto_map") else unknown
    if (settings := resolved(config)) is None:
        return f"Transformers {registry.version} does not understand its config.json"
    from sakuradite.engine.torch import device, loading

    try:
        loading.check_supported(settings, device.pick_device("auto"))
    except UnsupportedModelError as error:
        return str(error)
    return None


def _mlx(config: Mapping[str, Any]) -> str | None:
    registry = transformers_registry()
    if registry is None or not _installed("mlx", "mlx_lm"):
        return str(MissingExtraError("the MLX backend", "mlx"))
    from sakuradite.engine import mlx

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            mlx.check(Path(folder))
        except (APIError, MissingExtraError) as error:
            return str(error).replace(folder, "the checkpoint")
        except StrictDataclassError:
            return f"Transformers {registry.version} does not understand its config.json"
    return None


def _installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)
