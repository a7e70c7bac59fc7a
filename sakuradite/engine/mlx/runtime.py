"""What is installed and what it runs on: the MLX libraries, their versions, the device, its memory.

What only a Mac can show hangs on `has_metal`; which runtime `backend="auto"` takes is decided in `engine.loading`.
"""

from __future__ import annotations

import os
import re
import resource
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from sakuradite.engine.mlx.families import WRONG_FOR_QWEN3_5
from sakuradite.errors import (
    ConfigurationError,
    InsufficientResourcesError,
    MissingExtraError,
    UnsupportedModelError,
)

MINIMUM_MLX_LM = (0, 32, 2)  # what the families were compared with; 0.31.3 answers wrongly for falcon_h1 and lfm2_moe
MINIMUM_MLX_VLM = (0, 7, 10)
TOUCHED_VARIABLES = ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "TRANSFORMERS_VERBOSITY")
PROCESSOR_METHODS = ("__init__", "__call__", "from_pretrained")
METAL_NAMES = ("mps", "metal", "gpu")
OUT_OF_MEMORY = ("attempting to allocate", "unable to allocate", "insufficient memory", "outofmemory")
CACHE_SHARE = 8  # one part in so many of the memory may hold prefix caches when max_cache_bytes is not set


def has_metal() -> bool:
    """Whether MLX has a GPU here. Imports MLX."""
    import mlx.core as mx

    return bool(mx.metal.is_available())


def installed(package: str) -> tuple[int, ...] | None:
    """The version of an installed distribution as numbers, None when it is not there."""
    try:
        text = version(package)
    except PackageNotFoundError:
        return None
    start = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, start.group().split("."))) if start else ()


def is_installed() -> bool:
    """Whether the extra [mlx] is there, without importing it."""
    return find_spec("mlx") is not None and find_spec("mlx_lm") is not None


def require(package: str, minimum: tuple[int, ...]) -> None:
    """Raise MissingExtraError when a library is absent, ConfigurationError when it is too old."""
    found = installed(package)
    if found is None or not is_installed():
        raise MissingExtraError("The MLX backend", "mlx")
    if found < minimum:
        raise ConfigurationError(
            f"the MLX backend needs {package} {_dotted(minimum)} or newer and found {_dotted(found)}: "
            "pip install -U 'sakuradite[mlx]'"
        )


def require_for(model_type: str) -> None:
    """Raise what keeps the installed mlx-lm from a family: MissingExtraError, ConfigurationError for an old version,
    and for Qwen3.5 UnsupportedModelError with the defect."""
    require("mlx-lm", ())
    refuse_old_qwen3_5(model_type)
    require("mlx-lm", MINIMUM_MLX_LM)


def refuse_old_qwen3_5(model_type: str) -> None:
    """mlx-lm up to 0.31.3 normalises Qwen3.5's recurrent queries and keys wrongly."""
    found = installed("mlx-lm")
    if model_type.startswith("qwen3_5") and found is not None and found <= WRONG_FOR_QWEN3_5:
        raise UnsupportedModelError(
            f"Qwen3.5 is refused on MLX with mlx-lm {_dotted(found)}: versions up to {_dotted(WRONG_FOR_QWEN3_5)} "
            "normalise its recurrent queries and keys wrongly; use backend torch, or a newer mlx-lm"
        )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


@cache
def library(name: str) -> Any:
    """Import a part of mlx-lm or mlx-vlm without its side effects on this process.

    `mlx_lm.utils` lowers the limit of open files to 2048 (hard limit 4096), which cannot be undone without privileges;
    a server holds more connections than that. `mlx_vlm` sets Transformers' variables in the environment, and its models
    replace `AutoProcessor.from_pretrained` by one that trusts a checkpoint's own code, and methods of Transformers'
    `Lfm2VlProcessor` by others.
    """
    from transformers import AutoProcessor, Lfm2VlProcessor

    lower, environment = resource.setrlimit, dict(os.environ)
    methods = [(c, n, c.__dict__.get(n)) for c in (AutoProcessor, Lfm2VlProcessor) for n in PROCESSOR_METHODS]
    resource.setrlimit = lambda *_: None
    try:
        return import_module(name)
    finally:
        resource.setrlimit = lower
        for owner, method, original in methods:
            if original is not None:
                setattr(owner, method, original)
            elif method in owner.__dict__:
                delattr(owner, method)
        for variable in TOUCHED_VARIABLES:
            if variable in environment:
                os.environ[variable] = environment[variable]
            else:
                os.environ.pop(variable, None)


def choose_device(wanted: str) -> str:
    """Make `wanted` (auto, cpu, or mps) MLX's device in this process; returns "metal" or "cpu"."""
    import mlx.core as mx

    if wanted not in ("auto", "cpu", *METAL_NAMES):
        raise ConfigurationError(f"device {wanted!r} is not MLX's: it knows auto, cpu and mps", param="device")
    metal = has_metal()
    if wanted in METAL_NAMES and not metal:
        raise InsufficientResourcesError(
            f"device {wanted} needs an Apple GPU; this machine has the CPU only: use device cpu or auto"
        )
    if metal and wanted != "cpu":
        mx.set_default_device(mx.gpu)
        return "metal"
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # on a CPU it starts g++ for each fused operation: 18 of a tiny Qwen3-Next's first 22 seconds
    return "cpu"


def cache_bytes(configured: int | None) -> int:
    """Bytes that prefix caches may hold: as configured, or an eighth of the machine's memory (unified on a Mac)."""
    if configured is not None:
        return configured
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // CACHE_SHARE


def is_out_of_memory(error: Exception) -> bool:
    """Whether MLX failed for want of memory: a RuntimeError of Metal's, told by its text alone.

    MLX's CPU build never says so: the process ends where the system gives it no memory.
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in OUT_OF_MEMORY)
