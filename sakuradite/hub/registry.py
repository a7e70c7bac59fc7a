"""Which model types the installed libraries know by themselves, so that no code of a repository is ever needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sakuradite.errors import UnsupportedModelError
from sakuradite.hub.safety import CUSTOM_CODE


@dataclass(frozen=True, slots=True)
class Registry:
    """The model types that this version of Transformers has classes for."""

    version: str
    known: frozenset[str]


@cache
def transformers_registry() -> Registry | None:
    """The registry of the installed Transformers; None where it is not installed. Takes seconds the first time."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return Registry(__version__, frozenset(CONFIG_MAPPING_NAMES))


def mlx_knows(model_type: str) -> bool:
    """Whether an mlx-lm is installed that has a model file for this type (types it renames apart)."""
    if not model_type.isidentifier() or importlib.util.find_spec("mlx_lm") is None:
        return False
    return importlib.util.find_spec(f"mlx_lm.models.{model_type}") is not None


def check_code(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a model that only its repository's code could load.

    Where no runtime is installed to ask, nothing is raised: whoever loads the model will check.
    """
    if not config.get("auto_map"):
        return
    model_type = str(config.get("model_type", ""))
    registry = transformers_registry()
    if registry is not None and model_type not in registry.known and not mlx_knows(model_type):
        raise UnsupportedModelError(CUSTOM_CODE)
