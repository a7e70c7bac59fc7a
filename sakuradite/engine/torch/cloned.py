"""The cloned layout: a prefix's recurrent and attention state computed once, copied for each row that continues it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from sakuradite.engine.backend import Prefix, Row, RowScores
from sakuradite.engine.torch.forward import Caller, Reading, Wanted, scattered, to_device
from sakuradite.engine.torch.padded import MAX_PADDING, Padded


class Cloned:
    """Scores rows prefix by prefix: the state after the prefix, once per row, and the padded suffixes behind it.

    Right padding is harmless here: a position never sees what comes after it. `plain` scores prefixes whose state would
    be over `cache_bytes`, and rows without a prefix.
    """

    def __init__(
        self, caller: Caller, device: torch.device, plain: Padded, pad: int, *, pass_tokens: int, cache_tokens: int
    ) -> None:
        self._caller, self._device, self._plain, self._pad = caller, device, plain, pad
        self._pass_tokens, self._cache_tokens = pass_tokens, cache_tokens
        self._head: tuple[int, ...] = ()
        self._head_state: Any = None
        self._kept: dict[int, int] = {}
        """Tokens whose state prefixes hold between batches, by id."""

    def set_head(self, tokens: Sequence[int]) -> None:
        """Take note of the constant head; its state is computed when first needed."""
        self._head, self._head_state = tuple(tokens), None

    def release(self, prefix: Prefix) -> None:
        """Free the state of a prefix."""
        prefix.cache = None
        self._kept.pop(id(prefix), None)

    def score(self, rows: Sequence[tuple[Prefix, Row]]) -> list[RowScores | Exception]:
        """Scores of valid rows, in their order. Rows of one prefix stand together."""
        scores: list[RowScores | Exception] = []
        for _, members in groupby(rows, key=lambda member: id(member[0])):
            group = list(members)
            prefix = group[0][0]
            if not 0 < len(prefix.tokens) <= self._cache_tokens:
                scores += self._plain.score(group)
                continue
            if prefix.cache is None:
                prefix.cache = self._prefix_state(prefix.tokens)
            scores += self._branches(prefix, [row for _, row in group])
            if len(prefix.tokens) + sum(self._kept.values()) > self._cache_tokens:
                self.release(prefix)
            else:
                self._kept[id(prefix)] = len(prefix.tokens)
        return scores

    def _prefix_state(self, tokens: tuple[int, ...]) -> Any:
        """The state after a prefix, continued from the constant head where it begins with it."""
        head = self._head
        if not head or tokens[: len(head)] != head:
            return self._continue(self._empty(), 0, tokens)
        if self._head_state is None:
            self._head_state = self._continue(self._empty(), 0, head)
        return self._continue(copy.deepcopy(self._head_state), len(head), tokens[len(head) :])

    def _empty(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._caller.model.config)

    def _continue(self, state: Any, position: int, tokens: Sequence[int]) -> Any:
        """Run tokens through a state, which changes in place."""
        for a in range(0, len(tokens), self._pass_tokens):
            part = tokens[a : a + self._pass_tokens]
            positions = to_device([list(range(position + a, position + a + len(part)))], self._device)
            keep = to_device([len(part) - 1], self._device)
            cache = {self._caller.cache_name: state}
            self._caller.logits(to_device([part], self._device), keep, positions, use_cache=True, **cache)
        return state

    def _branches(self, prefix: Prefix, rows: Sequence[Row]) -> list[RowScores | Exception]:
        batches = list(self._batches(rows))
        return scattered(batches, rows, [self._forward(prefix, [rows[i] for i in batch]) for batch in batches])

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in sorted(range(len(rows)), key=lambda i: len(rows[i].suffix)):
            computed = (len(batch) + 1) * len(rows[i].suffix)
            real = sum(len(rows[j].suffix) for j in (*batch, i))
            if batch and (computed > MAX_PADDING * real or computed > self._pass_tokens):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _forward(self, prefix: Prefix, rows: Sequence[Row]) -> Reading:
        state = copy.deepcopy(prefix.cache)
        if len(rows) > 1:
            state.reorder_cache(torch.zeros(len(rows), dtype=torch.long, device=self._device))
        longest, before = max(len(row.suffix) for row in rows), len(prefix.tokens)
        ids = to_device([[*row.suffix, *[self._pad] * (longest - len(row.suffix))] for row in rows], self._device)
        positions = to_device([list(range(before, before + longest))] * len(rows), self._device)
        keep = sorted({r.offset for row in rows for r in row.reads})
        cache = {self._caller.cache_name: state}
        logits = self._caller.logits(ids, to_device(keep, self._device), positions, use_cache=True, **cache)
        wanted: list[Wanted] = [
            (i * len(keep) + keep.index(r.offset), r.tokens) for i, row in enumerate(rows) for r in row.reads
        ]
        return Reading(logits.flatten(0, 1), wanted)
