"""The packed layout: rows of several requests in one row of tokens, each prefix computed once.

What a row answers does not depend on its company: prefixes are cut at fixed places, every piece is attended by itself,
and the products of a row do not depend on how many rows stand beside it (see `linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sakuradite.engine.backend import Prefix, Row, RowScores
from sakuradite.engine.torch.forward import Caller, Reading, Wanted, joined, to_device
from sakuradite.engine.torch.keyvalues import KeyValues
from sakuradite.engine.torch.pieces import Pass, Piece, running
from sakuradite.engine.torch.rotary import Regime, Rotary

FILLER = 0  # a token to stand beside a lone one: products of a single row round differently from those of several


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one forward, and what is kept between forwards, may take."""

    pass_tokens: int
    pass_reads: int
    cache_bytes: int
    cache_bytes_per_token: int


@dataclass(slots=True, eq=False)
class Plan:
    """The passes of a batch in order, the piece that each of its rows became, and how far stores will be filled."""

    passes: list[Pass] = field(default_factory=list)
    open: dict[Regime, Pass] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    filled: dict[KeyValues, int] = field(default_factory=dict)


class Packed:
    """Scores rows in packed forwards within bounds, and owns the stores of prefixes and of the constant head."""

    def __init__(
        self,
        caller: Caller,
        rotary: Rotary,
        device: torch.device,
        bounds: Bounds,
        round_up: Callable[[int], int] | None = None,
    ) -> None:
        """`round_up`: the size that a forward of so many tokens is filled up to, where sizes shall come again."""
        self._caller, self._rotary, self._device, self._bounds = caller, rotary, device, bounds
        self._round_up = round_up
        self._head: tuple[int, ...] = ()
        self._heads: dict[Regime, KeyValues] = {}
        self._kept: dict[int, int] = {}
        """Bytes that prefixes hold between batches, by id."""

    def set_head(self, tokens: Sequence[int]) -> None:
        """Take note of the constant head; it is computed when first needed, once per rotary regime."""
        self._head = tuple(tokens)
        self._heads.clear()

    def score(self, rows: Sequence[tuple[Prefix, Row]]) -> list[RowScores | Exception]:
        """Scores of valid rows, in their order. Rows of one prefix stand together."""
        prefixes = {id(prefix): prefix for prefix, _ in rows}
        try:
            plan = Plan()
            for prefix, row in rows:
                self._place(plan, prefix, row)
            scores = self._scores(plan)
        except BaseException:
            for prefix in prefixes.values():  # half-filled stores must not be continued
                self.release(prefix)
            raise
        for prefix in prefixes.values():
            self._keep_or_release(prefix)
        return [scores[piece] for piece in plan.pieces]

    def _scores(self, plan: Plan) -> dict[Piece, RowScores | Exception]:
        """What the pieces that are read answer. All forwards are set going before the device is waited for."""
        readings = [self._run(current) for current in plan.passes]
        scores: dict[Piece, RowScores | Exception] = {}
        for current, values in zip(plan.passes, Reading.fetch(readings), strict=True):
            found = iter(values)
            scores |= {piece: joined([next(found) for _ in piece.reads]) for piece in current.pieces if piece.reads}
        return scores

    def release(self, prefix: Prefix) -> None:
        """Free the stores of a prefix."""
        prefix.cache = None
        self._kept.pop(id(prefix), None)

    def _keep_or_release(self, prefix: Prefix) -> None:
        """Keep a prefix's stores for its next batch while all that is kept stays within its bound."""
        size = sum(store.bytes for store in (prefix.cache or {}).values())
        others = sum(kept for key, kept in self._kept.items() if key != id(prefix))
        if size == 0 or others + size > self._bounds.cache_bytes:
            self.release(prefix)
        else:
            self._kept[id(prefix)] = size

    def _place(self, plan: Plan, prefix: Prefix, row: Row) -> None:
        """Lay out a row, and before it what is missing of its prefix."""
        regime = self._rotary.regime(len(prefix.tokens) + len(row.suffix))
        reads = tuple((r.offset, r.tokens) for r in row.reads)
        size = len(prefix.tokens) * self._bounds.cache_bytes_per_token
        if 0 < size <= self._bounds.cache_bytes:
            store = self._store(plan, prefix, regime)
            piece = Piece(row.suffix, len(prefix.tokens), store, reads=reads)
        else:  # nothing to share, or more than may be held: the complete row by itself
            before = len(prefix.tokens)
            piece = Piece((*prefix.tokens, *row.suffix), 0, reads=tuple((before + o, t) for o, t in reads))
        self._add(plan, regime, piece)
        plan.pieces.append(piece)

    def _store(self, plan: Plan, prefix: Prefix, regime: Regime) -> KeyValues:
        """The prefix's store for a regime; its missing pieces are added to the plan."""
        if prefix.cache is None:
            prefix.cache = {}
        stores: dict[Regime, KeyValues] = prefix.cache
        if regime not in stores:
            stores[regime] = KeyValues(len(prefix.tokens), self._head_store(prefix, regime))
        store = stores[regime]
        self._fill(plan, regime, store, prefix.tokens)
        return store

    def _fill(self, plan: Plan, regime: Regime, store: KeyValues, tokens: tuple[int, ...]) -> None:
        """Pieces for what a store lacks of its tokens, cut by the place in the store and by nothing else."""
        done = plan.filled.get(store, store.filled)
        while done < len(tokens):
            part = tokens[done : done + self._bounds.pass_tokens]
            self._add(plan, regime, Piece(part, done, store, writes=True))
            done += len(part)
        plan.filled[store] = done

    def _head_store(self, prefix: Prefix, regime: Regime) -> KeyValues | None:
        """The constant head's keys and values, if the prefix begins with it."""
        head = self._head
        if not head or prefix.tokens[: len(head)] != head:
            return None
        if regime not in self._heads:
            plan, store = Plan(), KeyValues(len(head))
            self._fill(plan, regime, store, head)
            for current in plan.passes:
                self._run(current)
            self._heads[regime] = store
        return self._heads[regime]

    def _add(self, plan: Plan, regime: Regime, piece: Piece) -> None:
        current, bounds = plan.open.get(regime), self._bounds
        if (
            current is None
            or current.tokens + len(piece.tokens) > bounds.pass_tokens
            or current.reads + len(piece.reads) > bounds.pass_reads
        ):
            current = plan.open[regime] = Pass(regime)
            plan.passes.append(current)
        current.add(piece)

    def _run(self, current: Pass) -> Reading:
        """One forward: fills the stores it writes to, reads the pieces that are read, in their order."""
        anchor = self._rotary.anchor(current.regime)
        if anchor is not None:
            current.add(Piece((FILLER,), anchor))
        elif current.tokens == 1:
            current.add(Piece((FILLER,), 0))
        if self._round_up is not None and (missing := self._round_up(current.tokens) - current.tokens):
            current.add(Piece((FILLER,) * missing, 0))
        pieces = current.pieces
        ids = to_device([token for piece in pieces for token in piece.tokens], self._device)
        spans = [range(piece.position, piece.position + len(piece.tokens)) for piece in pieces]
        positions = to_device([position for span in spans for position in span], self._device)
        kept: dict[int, int] = {}  # position in the pass -> its index among the logits
        wanted: list[Wanted] = []
        for piece in pieces:
            for offset, tokens in piece.reads:
                wanted.append((kept.setdefault(piece.start + offset, len(kept)), tokens))
        keep = to_device(list(kept) or [current.tokens - 1], self._device)
        with running(current):
            logits = self._caller.logits(ids[None], keep, positions[None], use_cache=False)[0]
        for piece in pieces:
            if piece.writes and piece.store is not None:
                piece.store.filled = piece.position + len(piece.tokens)
        return Reading(logits, wanted)
