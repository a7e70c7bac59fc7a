"""The seam between the engine and a runtime: rows of tokens go in, log-probabilities of candidate labels come out.

The engine knows questions and labels, a backend knows weights. All of it runs on the one worker thread of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

type Layout = Literal["packed", "cloned", "padded"]
"""How rows of one request are laid out in a forward.

packed: the prefix once, suffixes one after another against it; cloned: the prefix once, its state copied per row;
padded: complete rows, right-padded.
"""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a backend found out about the model it loaded."""

    architecture: str
    device: str
    dtype: str
    context_length: int
    vocabulary_size: int
    parameters: int
    weight_bytes: int
    layout: Layout
    layout_reason: str
    """Why this layout; for `padded` what keeps the model from prefix reuse."""
    modalities: tuple[str, ...] = ("text",)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Read the model's next-token distribution after the suffix token at `offset`, at the given vocabulary ids."""

    offset: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: what follows the shared prefix, and where to read."""

    suffix: tuple[int, ...]
    reads: tuple[Read, ...]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Images:
    """Prepared images, under `Prefix.extras["images"]`: rows of a request that show the same images share one object.

    `arrays` are what the checkpoint's processor gave, by the names of the model's forward (`pixel_values`, …). The rows
    hold the image tokens, already expanded. `features` belongs to the backend and goes with the request.
    """

    arrays: Mapping[str, NDArray[Any]]
    features: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(slots=True, eq=False)
class Prefix:
    """What all rows of one request start with: the constant head and the state, as tokens.

    `cache` belongs to the backend, which may keep computed keys and values in it between batches of the same request;
    it is gone after `Backend.release`. Prefixes are never shared between requests.
    """

    tokens: tuple[int, ...]
    cache: Any = None
    extras: dict[str, Any] = field(default_factory=dict)
    """Inputs besides tokens: `images`. A prefix with images has no tokens and no cache: its rows are complete."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one request in a batch."""

    prefix: Prefix
    rows: Sequence[Row]


type RowScores = tuple[NDArray[np.float32], ...]
"""For each read of a row: log-probabilities (log-softmax over the whole vocabulary, float32) of its tokens."""


class OutOfDeviceMemory(Exception):
    """The batch did not fit; the engine halves it and goes on."""


class Backend(Protocol):
    """A loaded model. Not thread-safe: one thread calls it."""

    facts: ModelFacts

    def set_head(self, tokens: Sequence[int]) -> None:
        """Name the constant head that every prefix starts with, so that it can be computed once per model."""

    def score(self, groups: Sequence[Group]) -> list[list[RowScores | Exception]]:
        """One forward over the rows of all groups; per group, per row its scores, or the exception of a poisoned row.

        Raises OutOfDeviceMemory when the batch does not fit. What a row answers does not depend on the other rows
        beyond the rounding of the dtype.
        """

    def release(self, prefix: Prefix) -> None:
        """Free what the backend keeps for a prefix."""

    def close(self) -> None:
        """Free the weights."""
