"""Packed attention on CUDA, by torch's flash-attention kernels, which return their log-sum-exp.

For float16 and bfloat16 up to 256 wide; anything else takes the blocks of `attention`. Written after the kernels'
documented meaning: fewer key heads than query heads are grouped by the kernel, and a causal mask or a window is aligned
to the last query and the last key. Tests hold the arguments against that meaning on a CPU; no GPU has run this yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sakuradite.engine.torch.forward import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from sakuradite.engine.torch.attention import Shape

MAX_WIDTH = 256  # of a head, in the flash kernels
UNBOUNDED = -1


def usable(keys: Tensor, values: Tensor, shape: Shape) -> bool:
    """Whether the flash kernels can compute this layer."""
    return (
        keys.device.type == "cuda"
        and keys.dtype in (torch.float16, torch.bfloat16)
        and keys.shape[2] == values.shape[2] <= MAX_WIDTH
        and shape.softcap is None
    )


def window_left(n: int, m: int, start: int | None, window: int | None) -> int | None:
    """The kernel's left bound for n queries, the first at position `start`, on m keys; None where it cannot say it.

    The kernel takes query i to stand at m - n + i. Ours stands at start + i, which is start + n - m further on, so it
    sees that many fewer keys to its left. From 0 up every query sees the last key; below, some would see none, and the
    kernel's log-sum-exp of those is +inf.
    """
    if window is None or start is None:
        return UNBOUNDED
    left = window - 1 - (start + n - m)
    return left if left >= 0 else None


def attend(
    grouped: Tensor, keys: Tensor, values: Tensor, shape: Shape, out: Tensor, lse: Tensor, left: int, causal: bool
) -> None:
    """Attention of queries [kv_heads, group, n, d] to keys [kv_heads, m, d], written to `out` and `lse`."""
    kv_heads, group, n, d = grouped.shape
    query = grouped.reshape(kv_heads * group, n, d).transpose(0, 1).unsqueeze(0)
    found, log_sum = _kernel(
        query, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], None, n, keys.shape[1], causal, left, shape
    )
    out.copy_(found[0].view(n, kv_heads, group, d))
    lse.copy_(log_sum[0].view(kv_heads, group, n).permute(2, 0, 1))


def own(
    grouped: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int], shape: Shape, out: Tensor, lse: Tensor
) -> None:
    """Causal attention of neighbouring stretches, each to itself, in one call. Shapes as in `attend`."""
    kv_heads, group, n, d = grouped.shape
    ends = _ends(tuple(lengths), keys.device)
    query = grouped.reshape(kv_heads * group, n, d).transpose(0, 1)
    left = UNBOUNDED if shape.window is None else shape.window - 1
    longest = max(lengths)
    found, log_sum = _kernel(
        query, keys.transpose(0, 1), values.transpose(0, 1), ends, longest, longest, True, left, shape
    )
    out.copy_(found.view(n, kv_heads, group, d))
    lse.copy_(log_sum.view(kv_heads, group, n).permute(2, 0, 1))


@lru_cache(maxsize=256)  # more than a forward has stretches of different lengths
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where stretches of these lengths begin and end, int32 [stretches + 1]: sent to the device once for all layers."""
    return to_device(list(accumulate(lengths, initial=0)), device, torch.int32)


def _kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ends: Tensor | None,
    longest_query: int,
    longest_keys: int,
    causal: bool,
    left: int,
    shape: Shape,
) -> tuple[Tensor, Tensor]:
    """Output [(1,) n, heads, d] and log-sum-exp [(1,) heads, n]; `ends` where several stretches lie side by side."""
    output, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        ends,
        ends,
        longest_query,
        longest_keys,
        0.0,
        causal,
        False,
        scale=shape.scale,
        window_size_left=None if left == UNBOUNDED else left,
        window_size_right=0 if causal and left != UNBOUNDED else None,
    )
    return output, log_sum
