"""Parts: runs of rows that are decided, written and, after a kill, repeated as a whole.

Where they are cut depends on the input and `rows_per_part` alone, so that every run of a job cuts alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from sakuradite.batch.source import Row

PART_BYTES = 4 << 20  # of a part's JSON: it travels through the object store, of which a local Ray has 200 MB
MIN_ROWS, MAX_ROWS = 32, 4096
PARTS = 2000  # of a large input: few enough for a folder, enough for hundreds of replicas


class Part(NamedTuple):
    """Rows that travel together: the part's number, and the position of the first of these rows in it."""

    number: int
    first: int
    rows: list[Row]


def rows_per_part(rows: int) -> int:
    """How many rows make a part, for an input of so many: about `PARTS` parts, within `MIN_ROWS` and `MAX_ROWS`."""
    return min(MAX_ROWS, max(MIN_ROWS, -(-rows // PARTS)))


def parts(rows: Iterable[Row], size: int) -> Iterator[Part]:
    """Parts of `size` rows, shorter where they reach PART_BYTES."""
    number, held, room = 0, list[Row](), PART_BYTES
    for row in rows:
        held.append(row)
        room -= len(row.data)
        if len(held) == size or room <= 0:
            yield Part(number, 0, held)
            number, held, room = number + 1, [], PART_BYTES
    if held:
        yield Part(number, 0, held)


def single(cut: Iterable[Part], wanted: Container[int]) -> Iterator[Part]:
    """The rows of the wanted parts, each alone."""
    for part in cut:
        if part.number in wanted:
            for position, row in enumerate(part.rows):
                yield Part(part.number, position, [row])
