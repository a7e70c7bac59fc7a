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
        ("in.csv", b'"a,b\n1,2\n', "the record in line 1 has a quote that is never closed"),
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


def no_text() -> pa.Array:
    """A column of text whose second value is no UTF-8, as only a foreign writer makes it."""
    ends, data = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1, 3, 4))), pa.py_buffer(b"a\xffbc")
    return pa.Array.from_buffers(pa.string(), 3, [None, ends, data])


@pytest.mark.parametrize(
    ("column", "shown", "why"),
    [
        (pa.array([0, 2**31 - 1, 1], pa.date32()), "<value out of range: 2147483647>", "days=2147483647"),
        (pa.array([0, 5 * 10**17, 1], pa.timestamp("us")), "17814-05-16 00:53:20.000000", "date value out of range"),
        (pa.array([0, 2**62, 1], pa.timestamp("us", "UTC")), "17036-07-06 14:00:27.387904Z", "date value"),
        (pa.array([0, 2**62, 1], pa.duration("s")), "4611686018427387904", "Python int too large"),
        (pa.array([[0], [2**62], [1]], pa.list_(pa.timestamp("us"))), None, "date value out of range"),
        (no_text(), "\N{REPLACEMENT CHARACTER}b", "can't decode byte 0xff"),
    ],
    ids=["day", "moment", "moment with zone", "span", "nested", "text"],
)
def test_a_value_that_python_has_none_for_is_a_problem_of_its_row(
    column: pa.Array, shown: str | None, why: str, tmp_path: Path
) -> None:
    table = pa.table({"state": ["a", "b", "c"], "x": column, "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "in.parquet")
    source = Source(tmp_path / "in.parquet")
    first, bad, last = source.rows()
    assert (first.problem, last.problem) == ("", "")
    assert [decoded(row)["n"] for row in (first, last)] == [1, 3]
    assert bad.problem.startswith("the column 'x' has a value that cannot be read: ")
    assert why in bad.problem
    assert decoded(bad) == {"state": "b", "x": shown, "n": 2}
    assert [row.problem for row in source.rows(["state"])] == ["", "", ""]


def test_times_of_nanoseconds_are_iso_8601_too(tmp_path: Path) -> None:
    when = pa.array([1_767_312_000_000_000_001], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"when": when}), tmp_path / "in.parquet")
    (row,) = Source(tmp_path / "in.parquet").rows()
    assert decoded(row) == {"when": "2026-01-02T00:00:00.000000001+00:00"}


def test_where_a_parquet_file_is_damaged_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    table = pa.table({"state": [f"state {i} " * 9 for i in range(900)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=300)
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 8] = b"\xff" * 8
    path.write_bytes(data)
    rows = Source(path).rows()
    with pytest.raises(ConfigurationError, match=r"in\.parquet: row groups 1 to 2 of 3, after row 256: "):
        list(rows)


def test_a_parquet_file_that_says_another_number_of_rows_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"state": ["a"] * 9}), tmp_path / "in.parquet")
    file = pq.ParquetFile(tmp_path / "in.parquet")

    class Lying:
        metadata = pq.read_metadata(tmp_path / "in.parquet")
        iter_batches = staticmethod(lambda *_, **__: iter(list(file.iter_batches(3))[:2]))

    monkeypatch.setattr("sakuradite.batch.source.parquet_file", lambda path: Lying)
    with pytest.raises(ConfigurationError, match="is damaged: 6 rows can be read, and it says that it has 9"):
        list(Source(tmp_path / "in.parquet").rows())


def test_a_quote_that_is_never_closed_takes_no_rows_with_it(tmp_path: Path) -> None:
    """Read as it stands, the rest of the file would be one cell of one row, and nobody would miss the others."""
    (tmp_path / "in.csv").write_text('id,state\n1,"two\nlines"\n2,"open\n3,c\n4,d\n')
    with pytest.raises(ConfigurationError, match=r"in\.csv: the record in line 4 has a quote that is never closed"):
        Source(tmp_path / "in.csv").count()


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_the_last_record_may_end_in_a_quote(end: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('id,state\n1,a\n2,"b"' + end)
    assert [decoded(row)["state"] for row in Source(tmp_path / "in.csv").rows()] == ["a", "b"]


def test_a_nul_in_a_csv_is_a_character_as_others(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id,state\n1,x\0y\n2,z\n")
    assert [decoded(row)["state"] for row in Source(tmp_path / "in.csv").rows()] == ["x\0y", "z"]


def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "in.JSONL.GZ").write_bytes(gzip.compress(LINES))
    assert Source(tmp_path / "in.JSONL.GZ").count() == 4


def test_an_archive_of_several_members_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b"1\n2\n") + gzip.compress(b"3\n"))
    assert [row.data for row in Source(tmp_path / "in.jsonl.gz").rows()] == [b"1", b"2", b"3"]


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n")
    (tmp_path / "b.jsonl").write_bytes(b"1\n")
    (tmp_path / "c.jsonl").write_bytes(b"2\n")
    a, b, c = (Source(tmp_path / f"{name}.jsonl").fingerprint() for name in "abc")
    assert a == b != c
    assert a["bytes"] == 2
