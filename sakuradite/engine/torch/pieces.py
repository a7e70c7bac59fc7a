"""What one packed forward is made of: pieces of prompts laid side by side in one row of tokens.

A piece of a prefix writes its keys into the prefix's store and attends to the store up to itself; a suffix attends to
its prefix's whole store and, causally, to itself. No piece sees another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sakuradite.engine.torch.keyvalues import KeyValues
from sakuradite.engine.torch.rotary import Regime


@dataclass(slots=True, eq=False)
class Piece:
    """`tokens` at `position`… of one prompt. `store` holds what stands before them; `writes`: they belong into it."""

    tokens: Sequence[int]
    position: int
    store: KeyValues | None = None
    writes: bool = False
    reads: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Offset of a token, and the vocabulary entries to read after it."""
    start: int = 0
    """Where it lies in its pass; set when the pass is laid out."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def read_rows(self) -> list[tuple[int, int]]:
        """The offsets that are read, and how many rows each makes: a lone one two, as single rows round differently."""
        offsets = sorted({offset for offset, _ in self.reads})
        return [(offset, 2 if len(offsets) == 1 else 1) for offset in offsets]


@dataclass(slots=True, eq=False)
class Pass:
    """Pieces of one forward, all of one rotary regime. Suffixes of one store lie next to one another."""

    regime: Regime = 0
    pieces: list[Piece] = field(default_factory=list)
    tokens: int = 0
    reads: int = 0

    def add(self, piece: Piece) -> None:
        piece.start = self.tokens
        self.pieces.append(piece)
        self.tokens += len(piece.tokens)
        self.reads += len(piece.reads)

    def rows(self) -> list[int]:
        """The tokens that are read, in order; see `Piece.read_rows`. All that the last layer has to give."""
        return [p.start + offset for p in self.pieces for offset, count in p.read_rows() for _ in range(count)]

    def runs(self) -> Iterator[list[Piece]]:
        """Neighbouring pieces that attend to the same store without writing to it; any other piece by itself."""
        run: list[Piece] = []
        for piece in self.pieces:
            if run and (piece.writes or piece.store is None or run[0].writes or run[0].store is not piece.store):
                yield run
                run = []
            run.append(piece)
        if run:
            yield run


class _Active(threading.local):
    current: Pass | None = None


_active = _Active()


@contextmanager
def running(current: Pass) -> Iterator[None]:
    """Make a pass the one that this thread's forward is about: attention layers have no other way to learn it."""
    _active.current = current
    try:
        yield
    finally:
        _active.current = None


def current_pass() -> Pass | None:
    """The pass that this thread's forward is about."""
    return _active.current
