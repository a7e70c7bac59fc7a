"""Input files as a stream of rows, each of them JSON: .jsonl, .csv and .parquet, the first two also .gz and .zst.

A file is never held in memory. A row that cannot be read is a row with a problem, not the end of the stream.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import stat
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import orjson

from sakuradite.errors import ConfigurationError, MissingExtraError

type Format = Literal["jsonl", "csv", "parquet"]

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
PARQUET_ROWS = 256  # decoded at a time
MAX_CELL = 1 << 30  # characters of a cell of CSV; Python's own limit is 128 KiB
DAMAGED = (OSError, EOFError, ValueError, NotImplementedError, csv.Error)
"""What reading a file raises that is cut off or is not what its name says, beside Arrow's own errors."""
NO_VALUE = (ValueError, OverflowError, NotImplementedError)
"""What Arrow raises for a value that Python has none for: a date in the year 20000, text that is no UTF-8."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class Row(NamedTuple):
    """One row: its line in the file, from 1 (of a parquet file: its number), its JSON, and why it has none."""

    line: int
    data: bytes
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A file of rows. Raises ConfigurationError for a name that tells no format."""

    path: Path

    @property
    def format(self) -> Format:
        """What the file's name says it is."""
        compressed = self.path.suffix.lower() in COMPRESSED
        found = file_format(self.path.with_suffix("") if compressed else self.path)
        if compressed and found == "parquet":
            raise ConfigurationError(f"{self.path}: parquet is compressed inside; leave out {self.path.suffix}")
        return found

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """All rows in order; of a parquet file only the `columns` are read where they are named.

        Raises ConfigurationError where the file cannot be read at all.
        """
        with reading(self.path):
            match self.format:
                case "jsonl":
                    yield from self._jsonl()
                case "csv":
                    yield from self._csv()
                case "parquet":
                    yield from self._parquet(columns)

    def batches(self, size: int, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """The rows of a parquet file as Arrow's batches of up to `size` rows.

        Raises ConfigurationError, with the row group and the row after which it is, where they cannot be read.
        """
        file, read = parquet_file(self.path), 0
        batches = file.iter_batches(size, columns=columns)
        while True:
            with reading(self.path, partial(_place, file.metadata, read, size)):
                batch = next(batches, None)
            if batch is None:
                break
            read += batch.num_rows
            yield batch
        if read != file.metadata.num_rows:
            raise ConfigurationError(
                f"{self.path}: is damaged: {read} rows can be read, and it says that it has {file.metadata.num_rows}"
            )

    def header(self) -> list[str] | None:
        """The names of the columns; None for .jsonl, where each row has its own."""
        with reading(self.path):
            match self.format:
                case "jsonl":
                    with self._open():
                        return None
                case "csv":
                    with self._text() as file:
                        _, names = next(self._records(file), (1, []))
                case "parquet":
                    names = parquet_file(self.path).schema_arrow.names
        if not names:
            raise ConfigurationError(f"{self.path}: has no header")
        if not all(map(is_text, names)):
            raise ConfigurationError(f"{self.path}: the header is no UTF-8; save the file as CSV in UTF-8")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"{self.path}: two columns are called {twice!r}")
        return names

    def fingerprint(self) -> dict[str, Any]:
        """The file's size and a digest of its content: what tells it from any other input."""
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
                return {"bytes": file.tell(), "blake2b": digest}
        except OSError as error:
            raise unreadable(self.path, error) from None

    def count(self) -> int:
        """How many rows there are. Reads the whole file, but for parquet, which says it."""
        if self.format == "parquet":
            return int(parquet_file(self.path).metadata.num_rows)
        return sum(1 for _ in self.rows())

    def check(self) -> None:
        """Refuse what is no file: it is read several times, from its beginning. Raises ConfigurationError."""
        if found := other_than_file(self.path):
            raise ConfigurationError(
                f"{self.path}: is {found}; the input has to be a file, which is read several times"
            )

    def _open(self) -> BinaryIO:
        if (codec := COMPRESSED.get(self.path.suffix.lower())) is None:
            return self.path.open("rb")
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(self.path), compression=codec)))

    def _text(self) -> io.TextIOWrapper:
        csv.field_size_limit(MAX_CELL)
        # What is no UTF-8 comes through as it is, and makes its row an error there, not here.
        return io.TextIOWrapper(self._open(), encoding="utf-8-sig", errors="surrogateescape", newline="")

    def _jsonl(self) -> Iterator[Row]:
        with self._open() as file:
            for number, line in enumerate(file, 1):
                if data := line.strip():
                    yield Row(number, data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data)

    def _csv(self) -> Iterator[Row]:
        header = self.header()
        assert header is not None
        with self._text() as file:
            records = self._records(file)
            next(records)
            for line, cells in records:
                if cells:
                    yield self._record(header, cells, line)

    def _records(self, file: io.TextIOWrapper) -> Iterator[tuple[int, list[str]]]:
        """The records of a CSV, header and blank lines among them, each with its first line.

        Raises ConfigurationError for a quote that is never closed: all rows after it would be one cell.
        """
        ended = False

        def end() -> Iterator[str]:  # a line more: a record of its own, unless a quote is open there
            nonlocal ended
            ended = True
            yield "end"

        reader, line = csv.reader(chain(file, end())), 1
        for cells in reader:
            if ended and line < reader.line_num:
                raise ConfigurationError(
                    f"{self.path}: the record in line {line} has a quote that is never closed; "
                    "all that follows would be one cell"
                )
            if ended:
                return
            yield line, cells
            line = reader.line_num + 1

    def _record(self, header: list[str], cells: list[str], line: int) -> Row:
        problem = ""
        if len(cells) != len(header):
            problem = f"the row has {len(cells)} fields and the header {len(header)}"
        return Row(line, encoded(dict(zip(header, cells, strict=False))), problem)

    def _parquet(self, columns: Sequence[str] | None) -> Iterator[Row]:
        number = 0
        for batch in self.batches(PARQUET_ROWS, columns):
            try:
                found = [(_json(values), "") for values in batch.to_pylist()]
            except NO_VALUE:
                found = [_with_problem(batch.slice(i, 1)) for i in range(batch.num_rows)]
            for data, problem in found:
                number += 1
                yield Row(number, data, problem)


def file_format(path: Path) -> Format:
    """The format that a file's suffix names."""
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return "jsonl"
        case ".csv":
            return "csv"
        case ".parquet":
            return "parquet"
    raise ConfigurationError(f"{path}: the name must end in .jsonl, .csv or .parquet")


def parquet_file(path: Path) -> Any:
    """An open parquet file. Raises ConfigurationError where it is none."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError("Bulk work", "batch") from None
    with reading(path):
        try:
            return parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ConfigurationError(f"{path}: no parquet file: {error}") from None


def encoded(values: dict[str, str]) -> bytes:
    """A row as JSON. Bytes that were no UTF-8 stay what they were, so that the reader of the JSON refuses them."""
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogateescape")


def decoded(row: Row) -> Any:
    """The value of a row. Raises ValueError where it is no JSON."""
    try:
        return json.loads(row.data.decode("utf-8", "surrogateescape"))
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_text(name: str) -> bool:
    """Whether there is no lone surrogate in it: of bytes that were no UTF-8, or of half an escape."""
    return name.isascii() or name == name.encode("utf-8", "replace").decode()


def _json(values: Any) -> bytes:
    """Values of Arrow's as JSON. orjson knows times, and writes null for what is not a number."""
    return orjson.dumps(values, default=_plain)


def _plain(value: object) -> str:
    """What neither JSON nor orjson has a word for: bytes as text, decimals and spans of time as Python writes them."""
    if isinstance(value, datetime):  # pandas' own, of nanoseconds
        return value.isoformat()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _with_problem(row: Any) -> tuple[bytes, str]:
    """A batch of one row as JSON; and why, where Python has no value for a cell and Arrow's text stands for it."""
    values, problem = dict[str, Any](), ""
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            (values[name],) = column.to_pylist()
        except NO_VALUE as error:
            values[name] = _shown(column)
            problem = problem or f"the column {name!r} has a value that cannot be read: {error}"
    return _json(values), problem


def _shown(column: Any) -> str | None:
    """What Arrow writes for the one value of a column, None where it has no words for it."""
    import pyarrow as pa

    try:
        (text,) = column.cast(pa.string()).cast(pa.binary()).to_pylist()
    except pa.ArrowException:
        return None
    return cast(bytes, text).decode("utf-8", "replace")


def _place(metadata: Any, read: int, size: int) -> str:
    """Where rows are that could not be read: the row groups of up to `size` rows after the first `read`."""
    groups = metadata.num_row_groups
    ends = list(accumulate(metadata.row_group(group).num_rows for group in range(groups)))
    first, last = bisect_right(ends, read) + 1, min(bisect_left(ends, read + size) + 1, groups)
    which = f"row group {first}" if last <= first else f"row groups {first} to {last}"
    return f"{which} of {groups}, after row {read}"


def other_than_file(path: Path) -> str | None:
    """What a path leads to where it is no file; None for a file, and for what is not there.

    Raises ConfigurationError where that cannot be found out.
    """
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a loop of links, a name too long; a NUL in it
        raise unreadable(path, error) from None


@contextmanager
def reading(path: Path, place: Callable[[], str] | None = None) -> Iterator[None]:
    """Reading a file: what it raises where the file is damaged becomes a ConfigurationError, with the place in it."""
    try:
        yield
    except DAMAGED as error:
        raise unreadable(path, error, place) from None
    except Exception as error:
        arrow = sys.modules.get("pyarrow")
        if arrow is None or not isinstance(error, arrow.ArrowException):
            raise
        raise unreadable(path, error, place) from None


def unreadable(path: Path, error: Exception, place: Callable[[], str] | None = None) -> ConfigurationError:
    """What to say of a file that cannot be read."""
    where = f"{path}: {place()}" if place else f"{path}"
    return ConfigurationError(f"{where}: {getattr(error, 'strerror', None) or error}")
