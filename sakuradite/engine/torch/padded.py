"""The padded layout: complete rows in ordinary batches, for models whose prefixes cannot be shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sakuradite.engine.backend import Prefix, Row, RowScores
from sakuradite.engine.torch.forward import Caller, Reading, Wanted, scattered, to_device
from sakuradite.engine.torch.rotary import Rotary

MAX_PADDING = 1.25  # computed over real tokens
CPU_PADDING = 1.0  # there it costs twice, in tokens and in the loss of the causal fast path


class Padded:
    """Scores complete rows, shortest first, by the model's own attention.

    On a CPU only rows of one length share a forward: there padding costs twice, in tokens and in the loss of the causal
    fast path (16 rows of 180-930 tokens: 31.8 s padded, 12.1 s one by one). A row by itself is never padded.
    """

    def __init__(
        self, caller: Caller, rotary: Rotary, device: torch.device, pad: int, *, pass_tokens: int, pass_reads: int
    ) -> None:
        self._caller, self._rotary, self._device, self._pad = caller, rotary, device, pad
        self._pass_tokens, self._pass_reads = pass_tokens, pass_reads
        self._max_padding = CPU_PADDING if device.type == "cpu" else MAX_PADDING

    def set_head(self, tokens: Sequence[int]) -> None:
        """Nothing is shared, so nothing is to be prepared."""

    def release(self, prefix: Prefix) -> None:
        """Nothing is kept."""

    def score(self, rows: Sequence[tuple[Prefix, Row]]) -> list[RowScores | Exception]:
        """Scores of valid rows, in their order."""
        batches = list(self._batches(rows))
        return scattered(batches, [row for _, row in rows], [self._forward([rows[i] for i in b]) for b in batches])

    def _batches(self, rows: Sequence[tuple[Prefix, Row]]) -> Iterator[list[int]]:
        """Rows that run together, as indices: of one rotary regime, of about one length, within the bounds."""
        lengths = [len(prefix.tokens) + len(row.suffix) for prefix, row in rows]
        reads = [len({r.offset for r in row.reads}) for _, row in rows]
        batch: list[int] = []
        for i in sorted(range(len(rows)), key=lambda i: lengths[i]):
            if batch:
                members = [*batch, i]
                computed, real = len(members) * lengths[i], sum(lengths[j] for j in members)
                if (
                    self._rotary.regime(lengths[i]) != self._rotary.regime(lengths[batch[0]])
                    or computed > self._max_padding * real
                    or computed > self._pass_tokens
                    or len(members) * sum(reads[j] for j in members) > self._pass_reads
                ):
                    yield batch
                    batch = []
            batch.append(i)
        if batch:
            yield batch

    def _inputs(self, ids: torch.Tensor, rows: Sequence[tuple[Prefix, Row]]) -> dict[str, Any]:
        """What a forward of these rows gets besides tokens: nothing, for text."""
        return {}

    def _forward(self, rows: Sequence[tuple[Prefix, Row]]) -> Reading:
        tokens = [(*prefix.tokens, *row.suffix) for prefix, row in rows]
        longest = max(map(len, tokens))
        ids = to_device([[*t, *[self._pad] * (longest - len(t))] for t in tokens], self._device)
        mask = None
        if any(len(t) < longest for t in tokens):
            mask = to_device([[1] * len(t) + [0] * (longest - len(t)) for t in tokens], self._device)
        ends = [{len(prefix.tokens) + r.offset for r in row.reads} for prefix, row in rows]
        keep = sorted(set().union(*ends))  # the same positions for every row: a union, of which each row reads its own
        self._rotary.reset(self._caller.model)
        inputs = self._inputs(ids, rows) | ({} if mask is None else {"attention_mask": mask})
        logits = self._caller.logits(ids, to_device(keep, self._device), use_cache=False, **inputs)
        wanted: list[Wanted] = [
            (i * len(keep) + keep.index(len(prefix.tokens) + r.offset), r.tokens)
            for i, (prefix, row) in enumerate(rows)
            for r in row.reads
        ]
        return Reading(logits.flatten(0, 1), wanted)
