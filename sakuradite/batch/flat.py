"""Answers as columns: names, types and values for .csv and .parquet, and what kept columns of .jsonl become there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson

from sakuradite.batch.source import is_text
from sakuradite.errors import ConfigurationError
from sakuradite.questions import Choice, Noul, Score

type Kind = Literal["bool", "int", "float", "text"]

LINE, TOKENS, CODE, MESSAGE = "line", "usage.input_tokens", "error.code", "error.message"
INT64 = range(-(1 << 63), 1 << 63)


def answer_columns(questions: Mapping[str, Noul | Choice | Score]) -> dict[str, tuple[str, ...]]:
    """The columns of all answers, each with the path of its value in a row's fields.

    Raises ConfigurationError where two have one name.
    """
    columns: dict[str, tuple[str, ...]] = {"model": ("model",)}
    for key, question in questions.items():
        for path in _paths(question):
            _add(columns, ".".join((key, *path)), ("answers", key, *path))
    for name in (TOKENS, CODE, MESSAGE):
        _add(columns, name, tuple(name.split(".")))
    return columns


def _paths(question: Noul | Choice | Score) -> list[tuple[str, ...]]:
    match question:
        case Noul():
            paths: list[tuple[str, ...]] = [("noul",)]
        case Choice(criteria=options):
            paths = [("choice",), ("confidence",), *(("probabilities", name) for name in options)]
        case Score(criteria=levels):
            paths = [("score",), ("confidence",), *(("probabilities", str(i)) for i in range(len(levels)))]
    return [*paths, ("x_label_mass",)]


def _add(columns: dict[str, tuple[str, ...]], name: str, path: tuple[str, ...]) -> None:
    if name in columns:
        raise ConfigurationError(f"two answers need the column {name!r}: rename a question, or write .jsonl")
    columns[name] = path


def column_kind(path: tuple[str, ...]) -> Kind:
    """The type of an answer's column."""
    if path[-1] in ("choice", "code", "message", "model"):
        return "text"
    return "int" if path[0] == "usage" else "float"


def value_at(fields: Any, path: Sequence[str]) -> Any:
    """What stands at a path of a row's fields, None where there is nothing."""
    for key in path:
        if not isinstance(fields, dict) or key not in fields:
            return None
        fields = fields[key]
    return fields


def check_free(kept: Iterable[str], columns: Iterable[str]) -> None:
    """Refuse kept columns of the input that have the name of one of ours."""
    if both := sorted(set(kept) & {LINE, *columns}):
        raise ConfigurationError(
            f"the input has a column {both[0]!r}, which the answers need too: leave it out with --keep, or write .jsonl"
        )


class Kinds:
    """The columns of .jsonl rows and what they hold, found by looking at each row once."""

    def __init__(self) -> None:
        self.found: dict[str, Kind | None] = {}

    def see(self, row: Any) -> None:
        """One more row."""
        if isinstance(row, dict):
            for key, value in row.items():
                if is_text(key):  # else the row is refused, and no file can have such a column
                    self.found[key] = _wider(self.found.get(key), value)

    def columns(self) -> dict[str, Kind]:
        """Each column with the narrowest type that holds all its values; JSON text where there is none."""
        return {name: kind or "text" for name, kind in self.found.items()}


def _wider(kind: Kind | None, value: Any) -> Kind | None:
    if value is None:
        return kind
    now: Kind = "text"
    if isinstance(value, bool):
        now = "bool"
    elif isinstance(value, int):
        now = "int" if value in INT64 else "text"
    elif isinstance(value, float):
        now = "float"
    if kind in (None, now):
        return now
    return "float" if {kind, now} == {"int", "float"} else "text"


def cell(value: Any, kind: Kind) -> Any:
    """A value in a column of a kind: text as it is, other values in a column of text as JSON."""
    if value is None or kind != "text":
        return float(value) if kind == "float" and value is not None else value
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # takes whatever json.loads gives, however deep


def parse(line: bytes) -> Any:
    """The fields of a row as the replica wrote them."""
    return orjson.loads(line)
