"""Input files as a stream of rows, each of them JSON: .jsonl, .csv and .parquet, the first two also .gz and .zst.

A file is never held in memory. A row that cannot be read is a row with a problem, not the end of the stream.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import orjson

from sakuradite.errors import ConfigurationError, MissingExtraError

type Format = Literal["jsonl", "csv", "parquet"]

COMPRESSED = {".gz", ".zst"}
PARQUET_ROWS = 256  # decoded at a time
MAX_CELL = 1 << 30  # characters of a cell of CSV; Python's own limit is 128 KiB


DAMAGED = (OSError, EOFError, ValueError, NotImplementedError, OverflowError, csv.Error)
"""What reading a file raises that is cut off, is not what its name says, or has a date beyond Python's; Arrow's errors
are among them."""


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
        try:
            match self.format:
                case "jsonl":
                    yield from self._jsonl()
                case "csv":
                    yield from self._csv()
                case "parquet":
                    yield from self._parquet(columns)
        except DAMAGED as error:
            raise unreadable(self.path, error) from None

    def header(self) -> list[str] | None:
        """The names of the columns; None for .jsonl, where each row has its own."""
        try:
            match self.format:
                case "jsonl":
                    with self._open():
                        return None
                case "csv":
                    with self._text() as file:
                        names = next(csv.reader(file), [])
                case "parquet":
                    names = parquet_file(self.path).schema_arrow.names
        except DAMAGED as error:
            raise unreadable(self.path, error) from None
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

    def _open(self) -> BinaryIO:
        if self.path.suffix.lower() not in COMPRESSED:
            return self.path.open("rb")
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(self.path), compression="detect")))

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
            reader = csv.reader(file)
            next(reader)
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield self._record(header, cells, line)
                line = reader.line_num + 1

    def _record(self, header: list[str], cells: list[str], line: int) -> Row:
        problem = ""
        if len(cells) != len(header):
            problem = f"the row has {len(cells)} fields and the header {len(header)}"
        return Row(line, encoded(dict(zip(header, cells, strict=False))), problem)

    def _parquet(self, columns: Sequence[str] | None) -> Iterator[Row]:
        number = 0
        for batch in parquet_file(self.path).iter_batches(PARQUET_ROWS, columns=columns):
            for values in batch.to_pylist():
                number += 1
                # orjson knows times, and writes null for what is not a number
                yield Row(number, orjson.dumps(values, default=_plain))


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


def _plain(value: object) -> str:
    """What neither JSON nor orjson has a word for: bytes as text, decimals and spans of time as Python writes them."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    """What to say of a file that cannot be read."""
    return ConfigurationError(f"{path}: {getattr(error, 'strerror', None) or error}")
