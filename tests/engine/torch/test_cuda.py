"""The CUDA path's arguments, held against what torch's flash kernels mean by them, written out for a CPU.

The stand-in follows flash-attention's documentation: query i of n stands at m - n + i among m keys; it sees keys from
`window_size_left` before that place to `window_size_right` after it (0 when causal); query heads share key heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sakuradite.engine.torch import attention, cuda
from sakuradite.engine.torch.attention import Queries, Shape
from tests.engine.torch.test_attention import GROUP, KV_HEADS, WIDTH, reference, run, tensors


def kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cum_q: torch.Tensor | None,
    cum_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
) -> tuple[torch.Tensor, ...]:
    """What `_flash_attention_forward` computes: [batch, n, heads, d], or [n, heads, d] by cumulative lengths."""
    assert (dropout, debug) == (0.0, False)
    if cum_q is not None:
        assert cum_k is not None
        assert cum_q.dtype == torch.int32
        assert int(cum_q.diff().max()) == max_q == max_k
        parts = []
        for a, b in zip(cum_q[:-1].tolist(), cum_q[1:].tolist(), strict=True):
            inner = (query[a:b][None], keys[a:b][None], values[a:b][None], None, None, b - a, b - a, 0.0, causal, False)
            left, right = window_size_left, window_size_right
            parts.append(kernel(*inner, scale=scale, window_size_left=left, window_size_right=right))
        return torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], dim=1)
    n, m = query.shape[1], keys.shape[1]
    assert (n, m) == (max_q, max_k)
    group = query.shape[2] // keys.shape[2]
    k, v = (t[0].transpose(0, 1).repeat_interleave(group, 0) for t in (keys, values))
    scores = torch.einsum("nhd,hmd->hnm", query[0], k) * scale
    place, column = m - n + torch.arange(n)[:, None], torch.arange(m)[None]
    right_most = 0 if causal else window_size_right
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if right_most is not None:
        hidden |= column > place + right_most
    if window_size_left is not None:
        hidden |= column < place - window_size_left
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hnm,hmd->nhd", scores.softmax(-1), v)[None], scores.logsumexp(-1)[None]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send everything the CUDA path would take to the stand-in; the list tells what came."""
    calls: list[str] = []

    def usable(keys: torch.Tensor, values: torch.Tensor, shape: Shape) -> bool:
        return shape.softcap is None

    def launched(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        calls.append("varlen" if args[3] is not None else "one")
        return kernel(*args, **kwargs)

    monkeypatch.setattr(cuda, "usable", usable)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", launched)
    return calls


@pytest.mark.parametrize("window", [None, 1, 7, 40, 500])
@pytest.mark.parametrize(("n", "before"), [(50, 0), (33, 70), (1, 70)])
def test_a_prefix_piece(window: int | None, n: int, before: int, on_cuda: list[str]) -> None:
    shape = Shape(0.3, window)
    q, k, v = tensors(n, before + n)
    out, _ = run(q, k, v, shape, before)
    assert torch.allclose(out.double(), reference(q, k, v, shape, before), atol=1e-5)
    assert on_cuda == ["one"]


@pytest.mark.parametrize(("window", "launches"), [(None, 2), (5, 1), (30, 2), (45, 2), (64, 2)])
def test_a_suffix_behind_its_prefix(window: int | None, launches: int, on_cuda: list[str]) -> None:
    """A window shorter than the suffix cannot be told to the kernel for the prefix: that part goes by blocks."""
    shape, before, n = Shape(0.3, window), 40, 20
    q, k, v = tensors(n, before + n)
    out, lse = run(q, k[:, before:], v[:, before:], shape, 0)
    other, other_lse = run(q, k[:, :before], v[:, :before], shape, before)
    assert torch.isfinite(other_lse).all()  # the kernel is never asked for a row without keys: it would say +inf
    attention.merge(out, lse, other, other_lse)
    assert torch.allclose(out.double(), reference(q, k, v, shape, before), atol=1e-5)
    assert len(on_cuda) == launches


@pytest.mark.parametrize("window", [None, 4])
def test_suffixes_side_by_side_are_one_launch(window: int | None, on_cuda: list[str]) -> None:
    shape, lengths = Shape(0.3, window), (5, 1, 17)
    q, k, v = tensors(23, 23)
    out, lse = torch.empty(23, KV_HEADS, GROUP, WIDTH), torch.empty(23, KV_HEADS, GROUP)
    attention.attend_own(Queries(q, KV_HEADS, 0.3), [(0, 5), (5, 6), (6, 23)], k, v, shape, out, lse)
    assert on_cuda == ["varlen"]
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        expected = reference(q[:, part], k[:, part], v[:, part], shape, 0)
        assert torch.allclose(out[part].double(), expected, atol=1e-5)
        start += length


def test_what_the_kernels_take() -> None:
    """Half precision on CUDA, heads up to 256 wide, no soft-capping; a CPU tensor never."""
    keys = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    assert not cuda.usable(keys, keys, Shape(1.0))
    schema = str(torch.ops.aten._flash_attention_forward.default._schema)
    for name in ("cum_seq_q", "max_k", "is_causal", "window_size_left", "window_size_right", "softmax_logsumexp"):
        assert name in schema
