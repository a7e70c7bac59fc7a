"""The attention function that Transformers' layers call in a packed forward.

Registered through their AttentionInterface, so the model's own layers do all the rest: projections, norms, rotary (by
position ids), experts, head, scaling, soft-capping of logits. Being no known mask kind, it makes them build no mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sakuradite.engine.torch import attention
from sakuradite.engine.torch.eligibility import declared_kinds, declared_window
from sakuradite.engine.torch.keyvalues import KeyValues
from sakuradite.engine.torch.pieces import Pass, Piece, current_pass

if TYPE_CHECKING:
    from torch import Tensor

IMPLEMENTATION = "sakuradite_packed"


def register() -> None:
    """Make IMPLEMENTATION known to Transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)


def layer_window(module: Any, given: int | None) -> int | None:
    """The sliding window of an attention layer: by its kind in the configuration, else as it passes it on."""
    config = module.config
    window = given if given is not None else declared_window(config)
    kinds = declared_kinds(config)
    if kinds is not None:
        return window if kinds[module.layer_idx] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """What the model's layers call in place of their attention. query [1, heads, n, d] -> [1, n, heads, d]."""
    current = current_pass()
    if current is None or query.shape[0] != 1 or query.shape[2] != current.tokens:
        raise RuntimeError("packed attention was called outside a packed forward")
    if position_bias is not None:
        raise NotImplementedError("packed attention knows no position bias")
    window = layer_window(module, sliding_window)
    shape = attention.Shape(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)
    out = attend(current, module.layer_idx, query[0], key[0], value[0], shape, s_aux)
    return out.view(1, current.tokens, query.shape[1], -1), None


def attend(
    current: Pass,
    layer: int,
    query: Tensor,
    k: Tensor,
    v: Tensor,
    shape: attention.Shape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a pass in one layer. query [heads, n, d], k and v [kv_heads, n, d] -> [n, kv_heads, group, d]."""
    queries = attention.Queries(query, k.shape[0], shape.scale)
    kv_heads, group, n, _ = queries.grouped.shape
    out = v.new_empty(n, kv_heads, group, v.shape[2])
    lse = torch.empty(n, kv_heads, group, dtype=torch.float32, device=v.device)
    for run in current.runs():
        a, b = run[0].start, run[-1].stop
        if run[0].writes:
            _extend(layer, run[0], queries, k[:, a:b], v[:, a:b], shape, out[a:b], lse[a:b])
        else:
            spans = [(piece.start, piece.stop) for piece in run]
            attention.attend_own(queries, spans, k[:, a:b], v[:, a:b], shape, out[a:b], lse[a:b])
            if run[0].store is not None:
                _shared(layer, run, run[0].store, queries, shape, out[a:b], lse[a:b])
        if sinks is not None:
            attention.add_sink(out[a:b], lse[a:b], sinks)
    return out


def attend_rows(current: Pass, layer: int, query: Tensor, k: Tensor, v: Tensor, shape: attention.Shape) -> Tensor:
    """The same for `current.rows()` alone, in their order, and what the pass writes to stores."""
    queries = attention.Queries(query[:, current.rows()], k.shape[0], shape.scale)
    kv_heads, group, n, _ = queries.grouped.shape
    out = v.new_empty(n, kv_heads, group, v.shape[2])
    lse = torch.empty(n, kv_heads, group, dtype=torch.float32, device=v.device)
    done = 0
    for run in current.runs():
        first, places = done, []
        for piece in run:
            if piece.writes:
                assert piece.store is not None
                span = slice(piece.start, piece.stop)
                piece.store.write(layer, piece.position, k[:, span], v[:, span])
            for offset, count in piece.read_rows():
                stop = piece.start + offset + 1
                start = piece.start if shape.window is None else max(piece.start, stop - shape.window)
                part = slice(done, done + count)
                keys, values = k[:, start:stop], v[:, start:stop]
                attention.attend(queries, (part.start, part.stop), keys, values, shape, out[part], lse[part], None)
                places.append((part, piece.position + offset))
                done += count
        if run[0].store is None or not places:
            continue
        keys, values = run[0].store.read(layer, run[0].position)
        other, other_lse = torch.empty_like(out[first:done]), torch.empty_like(lse[first:done])
        if shape.window is None or max(position for _, position in places) < shape.window:
            attention.attend(queries, (first, done), keys, values, shape, other, other_lse, None)
        else:
            for part, position in places:
                for i in range(part.start, part.stop):
                    found, sums = other[i - first : i - first + 1], other_lse[i - first : i - first + 1]
                    attention.attend(queries, (i, i + 1), keys, values, shape, found, sums, position)
        attention.merge(out[first:done], lse[first:done], other, other_lse)
    return out


def _extend(
    layer: int,
    piece: Piece,
    queries: attention.Queries,
    k: Tensor,
    v: Tensor,
    shape: attention.Shape,
    out: Tensor,
    lse: Tensor,
) -> None:
    """A piece of a prefix: into the store, then causal attention to all of it up to the piece's end."""
    assert piece.store is not None
    piece.store.write(layer, piece.position, k, v)
    keys, values = piece.store.read(layer, piece.position + len(piece.tokens))
    attention.attend(queries, (piece.start, piece.stop), keys, values, shape, out, lse, piece.position)


def _shared(
    layer: int,
    run: list[Piece],
    store: KeyValues,
    queries: attention.Queries,
    shape: attention.Shape,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The suffixes of one prefix: attention of all of them to its store, merged into what they have of themselves."""
    first, context = run[0].start, run[0].position
    keys, values = store.read(layer, context)
    other, other_lse = torch.empty_like(out), torch.empty_like(lse)
    longest = max(len(piece.tokens) for piece in run)
    if shape.window is None or context + longest <= shape.window:
        attention.attend(queries, (first, run[-1].stop), keys, values, shape, other, other_lse, None)
    else:
        for piece in run:
            span, part = (piece.start, piece.stop), slice(piece.start - first, piece.stop - first)
            attention.attend(queries, span, keys, values, shape, other[part], other_lse[part], context)
    attention.merge(out, lse, other, other_lse)
