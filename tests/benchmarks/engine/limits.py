"""What the machine can do at best: the rate of matrix products, the bandwidth of memory, the work of a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sakuradite.engine.torch import linear


def best(run: Callable[[], Any], seconds: float = 1.0) -> float:
    """The shortest of several runs, in seconds."""
    run()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.inference_mode()
def matmul_rate(config: Any, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the model's widest layer on 1,024 rows, by the library that the backend uses."""
    layer = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False, device=device, dtype=dtype)
    used = linear.PackedLinear(layer) if linear.available(device, dtype) else layer
    x = torch.randn(1024, config.hidden_size, dtype=dtype, device=device)
    work = 2.0 * 1024 * config.hidden_size * config.intermediate_size
    return float(work / best(lambda: _synchronised(used, x)))


@torch.inference_mode()
def bandwidth(device: torch.device) -> float:
    """Bytes per second that one large tensor is read with."""
    tensor = torch.ones(64 << 20, device=device)  # 256 MiB
    return tensor.nbytes / best(lambda: tensor.sum().item())


def _synchronised(layer: torch.nn.Module, x: torch.Tensor) -> None:
    layer(x)
    if x.device.type == "cuda":
        torch.cuda.synchronize()


def flops(config: Any, parameters: int, prefix: int, suffixes: Sequence[int], head: int) -> float:
    """Multiplications and additions that a request needs: layers, attention, and the head at one position per row."""
    embedded = config.vocab_size * config.hidden_size
    tied = 1 if config.tie_word_embeddings else 2
    parameters -= tied * embedded
    new = prefix - head
    pairs = new * (head + prefix) / 2 + sum(n * prefix + n * n / 2 for n in suffixes)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * pairs * config.num_attention_heads * width * config.num_hidden_layers
    return float(2 * parameters * (new + sum(suffixes)) + attention + 2 * embedded * len(suffixes))
