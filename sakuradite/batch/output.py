"""The output of a job that is done: kept columns of the input beside the answers, a row for each row, in its order.

Written beside the output and renamed, so that there is a whole one or none.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched, islice
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from sakuradite.batch.flat import LINE, Kind, answer_columns, cell, column_kind, parse, value_at
from sakuradite.batch.folder import landing, storage
from sakuradite.batch.source import Row, Source, decoded, file_format, parquet_file
from sakuradite.errors import InternalError, InvalidLifecycleError, ValidationError
from sakuradite.http.reading import read_json
from sakuradite.questions import Choice, Noul, Score

CHUNK = 4096  # rows of parquet written at a time
AS_IT_WAS = "sakuradite.as_it_was"


def _as_it_was(error: UnicodeError) -> tuple[bytes, int]:
    """For the encoder: bytes that were no UTF-8 when they were read are written as they were, half an escape as `?`."""
    assert isinstance(error, UnicodeEncodeError)
    codes = map(ord, error.object[error.start : error.end])
    return bytes(code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else ord("?") for code in codes), error.end


codecs.register_error(AS_IT_WAS, _as_it_was)


@dataclass(frozen=True, slots=True)
class Output:
    """What is to be written, and from what. `keep` names the columns that pass through, None: all.

    `kinds` are the columns of the input, with types where it is .jsonl, and None where they are not needed.
    """

    source: Source
    target: Path
    questions: Mapping[str, Noul | Choice | Score]
    keep: Sequence[str] | None
    kinds: Mapping[str, Kind] | None

    def kept(self) -> list[str]:
        """The names of the input's columns that pass through a flat output."""
        names = list(self.kinds or ())
        return names if self.keep is None else [name for name in self.keep if name in names]

    def write(
        self, temporary: Path, fields: Iterable[bytes], rows: int, content: Mapping[str, Any] | None = None
    ) -> None:
        """Write it all, at first as `temporary` on the same disk; of a symbolic link what it leads to.

        Raises InvalidLifecycleError where the input is not any more what was counted, or where its fingerprint is not
        `content`.
        """
        try:
            with temporary.open("wb") as file:
                self._writer()(file, _checked(zip(self.source.rows(), fields, strict=True), rows, self.source.path))
                file.flush()
                os.fsync(file.fileno())
            if content is not None and self.source.fingerprint() != content:
                raise _changed(self.source.path)
            place = landing(self.target)
            if place.exists():
                shutil.copymode(place, temporary)  # what only its owner may read stays so
            temporary.replace(place)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise storage(self.target, error) from None
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _writer(self) -> Callable[[Any, Iterator[tuple[Row, bytes]]], None]:
        return {"jsonl": self._jsonl, "csv": self._csv, "parquet": self._parquet}[file_format(self.target)]

    def _jsonl(self, file: Any, rows: Iterator[tuple[Row, bytes]]) -> None:
        for row, fields in rows:
            kept = self._kept_json(row, fields)
            input_ = b',"row":' + kept if kept is not None else b""
            file.write(b'{"line":%d%s,%s\n' % (row.line, input_, fields.strip()[1:]))

    def _kept_json(self, row: Row, fields: bytes) -> bytes | None:
        """The input's row as it stood there, or the columns of it that are kept; None where it is no JSON."""
        if self.keep is None and not fields.startswith(b'{"error"'):
            return row.data
        try:
            value = read_json(row.data)
        except ValidationError:
            return None
        if self.keep is None:
            return row.data
        return to_json({name: value[name] for name in self.keep if name in value} if isinstance(value, dict) else {})

    def _csv(self, file: Any, rows: Iterator[tuple[Row, bytes]]) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", errors=AS_IT_WAS, newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        kept, columns = self.kept(), answer_columns(self.questions)
        writer.writerow([LINE, *kept, *columns])
        for row, fields in rows:
            value, found = _values(row), parse(fields)
            line = [row.line, *(cell(value.get(name), "text") for name in kept)]
            writer.writerow([*line, *(value_at(found, path) for path in columns.values())])
        text.detach()

    def _parquet(self, file: Any, rows: Iterator[tuple[Row, bytes]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        types: dict[Kind, Any] = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": pa.string()}
        columns = answer_columns(self.questions)
        schema = pa.schema(
            [
                pa.field(LINE, pa.int64()),
                *self._kept_fields(types),
                *(pa.field(name, types[column_kind(path)]) for name, path in columns.items()),
            ]
        )
        with parquet.ParquetWriter(file, schema) as writer:
            for chunk, kept in self._chunks(rows, types):
                found = [parse(fields) for _, fields in chunk]
                arrays = [pa.array([row.line for row, _ in chunk], pa.int64()), *kept]
                arrays += [
                    pa.array([value_at(fields, path) for fields in found], types[column_kind(path)])
                    for path in columns.values()
                ]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

    def _chunks(
        self, rows: Iterator[tuple[Row, bytes]], types: Mapping[Kind, Any]
    ) -> Iterator[tuple[list[tuple[Row, bytes]], list[Any]]]:
        """Some rows at a time, with their kept columns. Those of a parquet file pass as they are."""
        if self.source.format == "parquet" and (names := self.kept()):
            for batch in self.source.batches(CHUNK, names):
                yield list(islice(rows, batch.num_rows)), [batch.column(name) for name in names]
        for chunk in batched(rows, CHUNK):
            yield list(chunk), self._kept_arrays([row for row, _ in chunk], types)

    def _kept_fields(self, types: Mapping[Kind, Any]) -> list[Any]:
        import pyarrow as pa

        if self.source.format == "parquet":
            schema = parquet_file(self.source.path).schema_arrow
            return [schema.field(name) for name in self.kept()]
        kinds = self.kinds or {}
        return [pa.field(name, types[kinds[name]]) for name in self.kept()]

    def _kept_arrays(self, rows: list[Row], types: Mapping[Kind, Any]) -> list[Any]:
        import pyarrow as pa

        kinds, values = self.kinds or {}, [_values(row) for row in rows]
        return [
            pa.array([_clean(cell(value.get(name), kinds[name])) for value in values], types[kinds[name]])
            for name in self.kept()
        ]


def _checked(pairs: Iterator[tuple[Row, bytes]], rows: int, path: Path) -> Iterator[tuple[Row, bytes]]:
    """The pairs of input and answers; refuses an input that changed meanwhile rather than pair them wrongly."""
    seen = 0
    try:
        for pair in pairs:
            seen += 1
            yield pair
    except ValueError:
        raise _changed(path) from None
    if seen != rows:
        raise InternalError(f"{rows} rows were counted and {seen} answered")


def _changed(path: Path) -> InvalidLifecycleError:
    return InvalidLifecycleError(
        f"{path} changed while it was worked on: put back what it was and run the command again, or add --restart"
    )


def _values(row: Row) -> dict[str, Any]:
    """The columns of a row; none where it is no JSON object."""
    try:
        value = decoded(row)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _clean(value: Any) -> Any:
    """Text that parquet takes: what was no UTF-8 becomes a question mark."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
