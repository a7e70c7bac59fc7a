"""Where and in which precision a model runs: device, dtype and CPU threads, from what was asked and what is here."""

from __future__ import annotations

import math
import os
import time
from functools import lru_cache
from typing import TYPE_CHECKING

from sakuradite.engine.torch.linear import product
from sakuradite.engine.torch.memory import free_bytes
from sakuradite.errors import ConfigurationError, InsufficientResourcesError

if TYPE_CHECKING:
    import torch

    from sakuradite.config import ModelConfig

DTYPES = ("float32", "bfloat16", "float16")
GAIN = 1.25
"""How many times faster bfloat16 must be to be kept. Known CPUs are far to either side of it (2 and 0.55), so that the
replicas of a model all find the same, however noisy their machine is."""


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


def pick_dtype(asked: str, stored: str | None, device: torch.device, weights: int = 0) -> torch.dtype:
    """The dtype of the weights. "auto" is the checkpoint's own, except on a CPU where it would be slow.

    On a CPU float16 is widened to float32, which loses nothing, and so is bfloat16 where `gains_by_bfloat16` says no,
    unless the widened `weights`, given in bytes of the files, do not fit in the memory that is free.
    """
    import torch

    if asked != "auto":
        if device.type == "mps" and asked == "bfloat16" and not _mps_has_bfloat16():
            raise ConfigurationError("bfloat16 needs macOS 14 on MPS; use float16 or float32", param="dtype")
        return getattr(torch, asked)  # type: ignore[no-any-return]
    name = stored if stored in DTYPES else "float32"
    if device.type == "cpu" and (
        name == "float16" or (name == "bfloat16" and not gains_by_bfloat16() and widened_fits(weights))
    ):
        name = "float32"
    if device.type == "mps" and name == "bfloat16" and not _mps_has_bfloat16():
        name = "float16"
    return getattr(torch, name)  # type: ignore[no-any-return]


def widened_fits(weights: int) -> bool:
    """Whether 16-bit weights of so many bytes fit into this machine's free memory as float32, with a tenth to spare."""
    import torch

    return 2.2 * weights <= free_bytes(torch.device("cpu"))


@lru_cache(maxsize=1)
def gains_by_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 clearly faster than float32.

    With AMX it does, without instructions for it it does not. AVX512-BF16 alone does not tell: a core of an AMD Zen 5
    reaches 500 GFLOP/s with it and 260 in float32, one of an Intel Emerald Rapids whose AMX is hidden 85 and 155. So
    there both are timed once per process, on one thread, in some 15 ms.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        return True
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of many, most of so short a product would be waiting for one another
    try:
        turns = [(_seconds(torch.bfloat16), _seconds(torch.float32)) for _ in range(7)]
    finally:
        torch.set_num_threads(threads)
    return GAIN * min(turn[0] for turn in turns) < min(turn[1] for turn in turns)


def _seconds(dtype: torch.dtype) -> float:
    """What a product of 256 rows takes."""
    import torch

    rows, weight = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    start = time.perf_counter()
    product(rows, weight)
    return time.perf_counter() - start


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
