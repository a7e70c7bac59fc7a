"""What a job is made from, as data: written when it begins, compared when it is gone on with."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from sakuradite.batch.flat import Kinds, answer_columns, check_free
from sakuradite.batch.parts import rows_per_part
from sakuradite.batch.source import Row, Source, decoded, file_format, is_text
from sakuradite.config import ModelConfig
from sakuradite.errors import ConfigurationError
from sakuradite.questions import Choice, Noul, Score

VERSION = 1
ANSWERING = ("model", "revision", "backend", "device", "dtype", "max_input_tokens", "max_questions")
"""The fields of a ModelConfig that answers depend on; the others may change between two runs of a job."""
DEFAULT_COLUMN = "state"
LOOK = 100  # rows of a .jsonl that are looked at for a column that was named


def made_from(
    source: Source,
    questions: Mapping[str, Any],
    config: ModelConfig,
    column: str | None,
    whole_row: bool,
) -> dict[str, Any]:
    """What answers depend on: the input's content, the questions, the model, and what of a row is the state."""
    return {
        "version": VERSION,
        "input": source.fingerprint(),
        "questions": [[key, question] for key, question in questions.items()],
        "model": {name: getattr(config, name) for name in ANSWERING},
        "state": None if whole_row else state_column(source, column),
    }


def layout(
    source: Source, target: Path, questions: Mapping[str, Noul | Choice | Score], keep: list[str] | None
) -> dict[str, Any]:
    """What is found by reading the whole input once: how many rows there are, and for a flat output their columns.

    Raises ConfigurationError where a column of the input has the name of an answer's.
    """
    columns: dict[str, Any] | None
    if file_format(target) == "jsonl":
        rows, columns = source.count(), None
    elif (header := source.header()) is None:
        rows, kinds = 0, Kinds()
        for rows, row in enumerate(source.rows(), 1):  # noqa: B007
            kinds.see(_value(row))
        columns = dict(kinds.columns())
    else:
        rows, columns = source.count(), dict.fromkeys(header, "text")
    check_columns(columns, questions, keep)
    return {"rows": rows, "part_rows": rows_per_part(rows), "columns": columns}


def check_columns(
    columns: Mapping[str, Any] | None, questions: Mapping[str, Noul | Choice | Score], keep: list[str] | None
) -> None:
    """Refuse a column of a flat output that has the name of an answer's. Raises ConfigurationError."""
    if columns is not None:
        check_free(columns if keep is None else keep, answer_columns(questions))


def check_same(manifest: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with a job that was made from something else. Raises ConfigurationError saying what differs."""
    differences = [text for name in now for text in _differences(name, manifest.get(name), now[name])]
    if differences:
        raise ConfigurationError(
            f"{folder} holds an unfinished job that was made from other things: {'; '.join(differences)}. "
            "Give it what it had, or add --restart to begin anew"
        )


def _differences(name: str, before: Any, now: Any) -> list[str]:
    if before == now:
        return []
    match name:
        case "input":
            return ["the input has another content"]
        case "questions":
            asked, earlier = dict(now), dict(before)
            ids = [key for key in {**earlier, **asked} if earlier.get(key) != asked.get(key)]
            return [f"the question {key!r} differs" for key in ids] or ["the questions have another order"]
        case "model":
            return [f"{key} is {now[key]!r} and was {before.get(key)!r}" for key in now if before.get(key) != now[key]]
        case "state":
            return [f"the state is {_named(now)} and was {_named(before)}"]
    return [f"{name} is {now!r} and was {before!r}"]


def _named(column: str | None) -> str:
    return "the whole row" if column is None else f"column {column!r}"


def state_column(source: Source, column: str | None) -> str | None:
    """The column that is the state: the one that was named, else `state` where the input has it, else the whole row.

    Of .jsonl the first row that can be read decides. Raises ConfigurationError for a column that is not there, in a
    .jsonl in none of the first rows.
    """
    names = source.header()
    if names is None:
        if column is not None:
            _check_rows(source, column)
            return column
        first = next((value for row in source.rows() if (value := _value(row)) is not None), None)
        names = list(first) if isinstance(first, dict) else []
    elif column is not None and column not in names:
        raise ConfigurationError(f"{source.path}: no column {column!r}; it has {', '.join(names)}")
    return column or (DEFAULT_COLUMN if DEFAULT_COLUMN in names else None)


def _check_rows(source: Source, column: str) -> None:
    """Refuse a column that none of the first rows of a .jsonl has: each row would be an error."""
    rows = [value for row in islice(source.rows(), LOOK) if isinstance(value := _value(row), dict)]
    if rows and not any(column in row for row in rows):
        raise ConfigurationError(
            f"{source.path}: none of the first {len(rows)} rows has a column {column!r}; "
            f"the first one has {', '.join(filter(is_text, rows[0]))}"
        )


def check_kept(source: Source, keep: list[str] | None) -> None:
    """Refuse to keep a column that is not there. A .jsonl is read until each has been seen, or to its end.

    Raises ConfigurationError with the columns that there are; none where no row of a .jsonl can be read.
    """
    if (names := source.header()) is not None:
        if missing := [name for name in keep or () if name not in names]:
            raise ConfigurationError(f"{source.path}: no column {missing[0]!r} to keep; it has {', '.join(names)}")
        return
    missing, seen, rows = list(keep or ()), dict[str, None](), source.rows()
    while missing and (row := next(rows, None)) is not None:
        if isinstance(value := _value(row), dict):
            seen |= dict.fromkeys(value)
            missing = [name for name in missing if name not in value]
    if missing and seen:
        raise ConfigurationError(
            f"{source.path}: no row has a column {missing[0]!r} to keep; there are {', '.join(filter(is_text, seen))}"
        )


def _value(row: Row) -> Any:
    try:
        return decoded(row)
    except ValueError:
        return None
