"""Cutting an input into parts: the same cuts in every run, bounded in rows and bytes."""

from __future__ import annotations

import pytest

from sakuradite.batch import parts as subject
from sakuradite.batch.parts import Part, parts, rows_per_part, single
from sakuradite.batch.source import Row


def rows(*sizes: int) -> list[Row]:
    return [Row(i + 1, b"x" * size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("total", "size"), [(0, 32), (1, 32), (64_000, 32), (64_001, 33), (1_000_000, 500), (10**9, 4096)]
)
def test_rows_of_a_part(total: int, size: int) -> None:
    assert rows_per_part(total) == size


def test_every_row_is_in_one_part_in_order() -> None:
    given = rows(*[1] * 10)
    cut = list(parts(given, 4))
    assert [part.number for part in cut] == [0, 1, 2]
    assert [len(part.rows) for part in cut] == [4, 4, 2]
    assert [row for part in cut for row in part.rows] == given


def test_a_part_ends_where_its_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PART_BYTES", 10)
    assert [len(part.rows) for part in parts(rows(4, 4, 4, 1, 50, 1), 100)] == [3, 2, 1]


def test_rows_of_some_parts_alone() -> None:
    given = rows(*[1] * 5)
    assert list(single(parts(given, 2), {1, 2})) == [
        Part(1, 0, [given[2]]),
        Part(1, 1, [given[3]]),
        Part(2, 0, [given[4]]),
    ]
