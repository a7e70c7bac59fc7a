"""Reading inputs: every row comes, with its line; what cannot be read is a row with a problem."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sakuradite.batch.source import Row, Source, decoded
from sakuradite.errors import ConfigurationError
from sakuradite.http.reading import read_json

LINES = b'{"a": 1}\n\n  \n"text"\r\n{broken\n[1.10]'


def test_lines_of_jsonl_keep_their_numbers_and_every_byte(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINES)
    rows = [Row(1, b'{"a": 1}'), Row(4, b'"text"'), Row(5, b"{broken"), Row(6, b"[1.10]")]
    assert list(Source(tmp_path / "in.jsonl").rows()) == rows
    assert Source(tmp_path / "in.jsonl").count() == 4
    assert Source(tmp_path / "in.jsonl").header() is None


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    (tmp_path / "in.csv").write_bytes(b"\xef\xbb\xbfa\n1\n")
    assert [decoded(row) for row in Source(tmp_path / "in.jsonl").rows()] == [{"a": 1}]
    assert [decoded(row) for row in Source(tmp_path / "in.csv").rows()] == [{"a": "1"}]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_are_the_same_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    if suffix == ".gz":
        path.write_bytes(gzip.compress(LINES))
    else:
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(LINES)
    (tmp_path / "in.jsonl").write_bytes(LINES)
    assert list(Source(path).rows()) == list(Source(tmp_path / "in.jsonl").rows())


def test_records_of_csv_may_span_lines_and_are_known_by_their_first(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('id,state\n1,"two\nlines, ""quoted"""\n\n2,\u00e9\n')
    rows = list(Source(tmp_path / "in.csv").rows())
    assert [row.line for row in rows] == [2, 5]
    assert [decoded(row) for row in rows] == [{"id": "1", "state": 'two\nlines, "quoted"'}, {"id": "2", "state": "é"}]
    assert Source(tmp_path / "in.csv").header() == ["id", "state"]


def test_lines_are_counted_from_the_first_of_a_header_that_spans_two(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('"first\nhalf",state\n1,a\n')
    assert [row.line for row in Source(tmp_path / "in.csv").rows()] == [3]


@pytest.mark.parametrize(("record", "fields"), [("1", 1), ("1,2,3", 3)])
def test_a_record_with_another_number_of_fields_is_a_row_with_a_problem(
    record: str, fields: int, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text(f"id,state\n{record}\n3,good\n")
    bad, good = Source(tmp_path / "in.csv").rows()
    assert bad.problem == f"the row has {fields} fields and the header 2"
    assert not good.problem


def test_what_is_no_utf_8_in_csv_is_refused_where_the_row_is_read_and_kept_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"state\nna\xefve\n")
    (row,) = Source(tmp_path / "in.csv").rows()
    with pytest.raises(Exception, match="Not valid UTF-8"):
        read_json(row.data)
    assert decoded(row)["state"].encode("utf-8", "surrogateescape") == b"na\xefve"


def test_a_cell_may_be_longer_than_pythons_own_limit(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("state\n" + "x" * 200_000 + "\n")
    (row,) = Source(tmp_path / "in.csv").rows()
    assert len(decoded(row)["state"]) == 200_000


def test_parquet_rows_are_json_whatever_their_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "state": pa.array(["a", None]),
            "when": pa.array([datetime(2026, 1, 2, tzinfo=UTC)] * 2),
            "price": pa.array([Decimal("1.10"), None]),
            "raw": pa.array([b"bytes", None]),
            "nan": pa.array([float("nan"), 2.5]),
            "nested": pa.array([{"x": [1, 2]}, None]),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=1)
    source = Source(tmp_path / "in.parquet")
    first, second = (read_json(row.data) for row in source.rows())
    assert first == {
        "state": "a",
        "when": "2026-01-02T00:00:00+00:00",
        "price": "1.10",
        "raw": "bytes",
        "nan": None,
        "nested": {"x": [1, 2]},
    }
    assert second["nan"] == 2.5
    assert [row.line for row in source.rows()] == [1, 2]
    assert [read_json(row.data) for row in source.rows(["state"])] == [{"state": "a"}, {"state": None}]
    assert (source.count(), source.header()) == (2, table.column_names)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.txt", b"", "must end in .jsonl, .csv or .parquet"),
        ("in", b"", "must end in .jsonl, .csv or .parquet"),
        ("in.parquet.gz", b"", "parquet is compressed inside"),
        ("in.parquet", b"no parquet", "no parquet file"),
        ("in.csv", b"", "has no header"),
        ("in.csv", b"a,b,a\n", "two columns are called 'a'"),
        ("in.csv", "Größe\n1\n".encode("latin-1"), "the header is no UTF-8"),
        ("in.csv", "a,b\n1,2\n".encode("utf-16"), "the header is no UTF-8"),
        ("in.csv", None, "No such file"),
        ("in.jsonl", None, "No such file"),
        ("in.parquet", None, "No such file"),
    ],
)
def test_files_that_cannot_be_an_input(name: str, content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        Source(tmp_path / name).header()


def test_a_damaged_archive_is_a_failure_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(LINES * 1000)[:60])
    with pytest.raises(ConfigurationError, match=r"in\.jsonl\.gz: "):
        list(Source(tmp_path / "in.jsonl.gz").rows())


def test_a_header_is_damaged_like_a_row(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('"' + "a" * 100)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sakuradite.batch.source.MAX_CELL", 50)
        with pytest.raises(ConfigurationError, match="field larger than field limit"):
            Source(tmp_path / "in.csv").header()


def test_a_date_beyond_pythons_is_a_failure_of_the_input(tmp_path: Path) -> None:
    pq.write_table(pa.table({"day": pa.array([2**31 - 1], pa.date32())}), tmp_path / "in.parquet")
    with pytest.raises(ConfigurationError, match=r"in\.parquet: days=2147483647"):
        list(Source(tmp_path / "in.parquet").rows())


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n")
    (tmp_path / "b.jsonl").write_bytes(b"1\n")
    (tmp_path / "c.jsonl").write_bytes(b"2\n")
    a, b, c = (Source(tmp_path / f"{name}.jsonl").fingerprint() for name in "abc")
    assert a == b != c
    assert a["bytes"] == 2
