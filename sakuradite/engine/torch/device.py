"""Where and in which precision a model runs: device, dtype and CPU threads, from what was asked and what is here."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from sakuradite.errors import ConfigurationError, InsufficientResourcesError

if TYPE_CHECKING:
    import torch

    from sakuradite.config import ModelConfig

DTYPES = ("float32", "bfloat16", "float16")


def pick_device(asked: str) -> torch.device:
    """The torch device of `ModelConfig.device`: auto, cpu, cuda, cuda:N or mps. "auto" takes CUDA, then MPS, then CPU.

    Raises ConfigurationError for a word that names no device, InsufficientResourcesError for one that is not here.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    here = ", ".join(["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(gpus)), *["mps"] * mps])
    if asked == "auto":
        return torch.device("cuda" if gpus else "mps" if mps else "cpu")
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdecimal()) or (index and kind != "cuda"):
        raise ConfigurationError(f"device {asked!r} is not known; use auto, cpu, cuda, cuda:N or mps", param="device")
    missing = (kind == "cuda" and int(index or 0) >= gpus) or (kind == "mps" and not mps)
    if missing:
        raise InsufficientResourcesError(f"device {asked!r} is not available; this machine has {here}", param="device")
    return torch.device(asked)


def pick_dtype(asked: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The dtype of the weights. "auto" is the checkpoint's own, except on a CPU where it would be slow.

    On a CPU bfloat16 stays bfloat16 only with AVX512-BF16 or AMX instructions; there 32 questions on one state took 3.9
    CPU seconds, and 6.1 in float32. Otherwise it is widened to float32, as float16 always is, which loses nothing.
    """
    import torch

    if asked != "auto":
        if device.type == "mps" and asked == "bfloat16" and not _mps_has_bfloat16():
            raise ConfigurationError("bfloat16 needs macOS 14 on MPS; use float16 or float32", param="dtype")
        return getattr(torch, asked)  # type: ignore[no-any-return]
    name = stored if stored in DTYPES else "float32"
    if device.type == "cpu" and (name == "float16" or (name == "bfloat16" and not cpu_has_bfloat16())):
        name = "float32"
    if device.type == "mps" and name == "bfloat16" and not _mps_has_bfloat16():
        name = "float16"
    return getattr(torch, name)  # type: ignore[no-any-return]


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 by itself (AVX512-BF16 or AMX); without, it measures slower than float32."""
    import torch

    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _mps_has_bfloat16() -> bool:
    import torch

    return torch.backends.mps.is_macos_or_newer(14, 0)


def set_threads(config: ModelConfig) -> int:
    """Give torch its threads and return how many: OMP_NUM_THREADS, else the replica's `num_cpus`, else all cores.

    All cores are those this process may run on, which in a container or under taskset are fewer than the machine has.
    """
    import torch

    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdecimal() and int(wanted) > 0:
        threads = int(wanted)
    elif config.num_cpus is not None and config.num_cpus > 0:
        threads = math.ceil(config.num_cpus)
    else:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads)
    return threads
