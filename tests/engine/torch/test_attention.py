"""The attention mathematics against torch's own, over windows, soft-capping, sinks, blocks and merges."""

from __future__ import annotations

import pytest
import torch

from sakuradite.engine.torch import attention
from sakuradite.engine.torch.attention import Shape
from sakuradite.engine.torch.memory import BLOCK_SCORES

KV_HEADS, GROUP, WIDTH = 2, 3, 16


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, start: int | None) -> torch.Tensor:
    """[n, kv_heads, group, d] by a full matrix of scores in float64. q: [heads, n, d]."""
    n, m = q.shape[1], k.shape[1]
    grouped = q.double().view(KV_HEADS, GROUP, n, -1)
    scores = torch.einsum("hgnd,hmd->hgnm", grouped, k.double()) * shape.scale
    if shape.softcap is not None:
        scores = (scores / shape.softcap).tanh() * shape.softcap
    if start is not None:
        i, j = start + torch.arange(n)[:, None], torch.arange(m)[None]
        hidden = (j > i) | ((j <= i - shape.window) if shape.window is not None else torch.tensor(False))
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hgnm,hmd->nhgd", scores.softmax(-1), v.double())


def tensors(n: int, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(n * 1000 + m)
    shapes = ((KV_HEADS * GROUP, n, WIDTH), (KV_HEADS, m, WIDTH), (KV_HEADS, m, WIDTH))
    q, k, v = (torch.randn(shape, generator=make) for shape in shapes)
    return q, k, v


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, start: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    n = q.shape[1]
    out = torch.full((n, KV_HEADS, GROUP, WIDTH), torch.nan)
    lse = torch.full((n, KV_HEADS, GROUP), torch.nan)
    attention.attend(attention.Queries(q, KV_HEADS, shape.scale), (0, n), k, v, shape, out, lse, start)
    return out, lse


@pytest.mark.parametrize("window", [None, 1, 7, 40, 500])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("n", "before"), [(1, 0), (50, 0), (33, 70), (1, 70)])
@pytest.mark.parametrize("block", [10, BLOCK_SCORES])
@pytest.mark.parametrize("flash_keys", [0, attention.FLASH_KEYS])
def test_causal_attention(
    window: int | None,
    softcap: float | None,
    n: int,
    before: int,
    block: int,
    flash_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "FLASH_KEYS", flash_keys)
    monkeypatch.setattr(attention, "BLOCK_SCORES", block)
    monkeypatch.setattr(attention, "MIN_BLOCK_TOKENS", 3)
    shape = Shape(0.3, window, softcap)
    q, k, v = tensors(n, before + n)
    out, _ = run(q, k, v, shape, before)
    assert torch.allclose(out.double(), reference(q, k, v, shape, before), atol=1e-5)


@pytest.mark.parametrize("window", [None, 5, 30, 45, 64])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("flash_keys", [0, attention.FLASH_KEYS])
def test_two_sets_of_keys_merge_into_attention_to_both(
    window: int | None, sinks: bool, flash_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix of 40 and a suffix of 20 apart, some queries seeing none of the prefix, against both at once."""
    monkeypatch.setattr(attention, "FLASH_KEYS", flash_keys)
    shape, before, n = Shape(0.3, window), 40, 20
    q, k, v = tensors(n, before + n)
    out, lse = run(q, k[:, before:], v[:, before:], shape, 0)
    other, other_lse = run(q, k[:, :before], v[:, :before], shape, before)
    attention.merge(out, lse, other, other_lse)
    expected = reference(q, k, v, shape, before)
    if sinks:
        sink = torch.linspace(-1, 3, KV_HEADS * GROUP)
        attention.add_sink(out, lse, sink)
        total = lse.double().exp()
        expected *= (total / (total + sink.double().exp().view(1, KV_HEADS, GROUP))).unsqueeze(-1)
        _, whole = run(q, k, v, shape, before)
        assert torch.allclose(lse, whole, atol=1e-5)
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.parametrize("flash_keys", [0, attention.FLASH_KEYS])
def test_bfloat16_keeps_scores_in_float32(flash_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores around 200, where bfloat16 steps by 1: weights would be off by factors, and are not."""
    monkeypatch.setattr(attention, "FLASH_KEYS", flash_keys)
    q, k, v = (t.bfloat16() for t in tensors(9, 30))
    k[:, :, 0], q[:, :, 0] = 10.0, 20.0
    shape = Shape(1.0)
    out, _ = run(q, k, v, shape, None)
    assert torch.allclose(out.double(), reference(q, k, v, shape, None), atol=0.02)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("start", [None, 30])
def test_a_first_key_without_weight(softcap: float | None, start: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight underflows to 0, so another key's has to tell the log-sum-exp."""
    monkeypatch.setattr(attention, "FLASH_KEYS", 0)
    q, k, v = tensors(9, 39)
    q[:, 2:, 0], k[:, 0, 0], k[:, 7, 0] = 60.0, -40.0, 3.0
    shape = Shape(0.3, None, softcap)
    out, lse = run(q, k, v, shape, start)
    scores = torch.einsum("hgnd,hmd->nhgm", q.double().view(KV_HEADS, GROUP, 9, -1), k.double()) * shape.scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if start is not None:
        hidden = torch.arange(39)[None] > start + torch.arange(9)[:, None]
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-4)
    assert torch.allclose(out.double(), reference(q, k, v, shape, start), atol=1e-5)
