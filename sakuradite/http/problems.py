"""What is wrong with a request, told without its content: locations, messages, and pydantic's errors made readable."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError as PydanticValidationError
from pydantic_core import ErrorDetails

from sakuradite.errors import FieldProblem, ValidationError

type Loc = tuple[str | int, ...]
"""Where in a request, from "body", "query" or "path" on."""

MAX_PROBLEMS = 50  # of one answer: a request of 400 wrong questions needs no list of 400
MAX_KEY_CHARACTERS = 256  # of one part of a location: a key may be as long as the body
MAX_READ = 3000  # errors of pydantic that are looked at
SHOWN_IN_MESSAGE = 3
LOCATION_PARTS = 6  # of a place deep inside content

CONTENT_TYPES = {"string_type", "dict_type", "list_type"}
"""The branches of a union of text, object and list: wrong in all of them is one problem, not three."""

MESSAGES = {
    "missing": "Field required",
    "extra_forbidden": "Unknown field",
    "string_type": "Input should be text",
    "dict_type": "Input should be a JSON object",
    "model_type": "Input should be a JSON object",
    "model_attributes_type": "Input should be a JSON object",
    "list_type": "Input should be a JSON list",
    "tuple_type": "Input should be a JSON list",
    "bool_type": "Input should be true or false",
    "string_too_short": "Must not be empty",
    "int_type": "Input should be an integer",
    "int_from_float": "Input should be an integer",
    "float_type": "Input should be a number",
    "finite_number": "Numbers must be finite",
}
SAFE = {
    "item_type",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "literal_error",
    "value_error",
}
"""Types whose own message names limits or allowed values, never what was sent."""


def dotted(loc: Loc) -> str:
    """The path of a location as text: `questions.team.criteria`, `images[0]`; empty for the whole body."""
    path = ""
    for part in loc[1:] if loc[:1] in (("body",), ("query",), ("path",)) else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def problem(loc: Loc, msg: str, type_: str) -> FieldProblem:
    """One entry of a 422's detail, with overlong keys shortened."""
    parts = tuple(
        part[:MAX_KEY_CHARACTERS] + "…" if isinstance(part, str) and len(part) > MAX_KEY_CHARACTERS else part
        for part in loc
    )
    return FieldProblem(parts, msg, type_)


def invalid(loc: Loc, msg: str, type_: str = "value_error") -> ValidationError:
    """The ValidationError of one field."""
    return refusal([problem(loc, msg, type_)])


def sentence(found: FieldProblem) -> str:
    """A problem as a line of text that starts with its path."""
    path = dotted(found.loc)
    return f"{path}: {found.msg}" if path else found.msg


def refusal(problems: Iterable[FieldProblem]) -> ValidationError:
    """The ValidationError of several fields: the first few in its message, up to `MAX_PROBLEMS` in its detail."""
    found = list(problems)
    message = "; ".join(sentence(p) for p in found[:SHOWN_IN_MESSAGE])
    if len(found) > SHOWN_IN_MESSAGE:
        message += f"; and {len(found) - SHOWN_IN_MESSAGE} more"
    return ValidationError(message, param=dotted(found[0].loc) or None, detail=found[:MAX_PROBLEMS])


def explain(error: PydanticValidationError, data: Any, root: Loc = ("body",)) -> ValidationError:
    """Pydantic's errors about `data` as one ValidationError: real paths (no union tags), nothing of the values."""
    found: dict[Loc, list[tuple[str, str]]] = {}
    for entry in error.errors(include_url=False, include_input=False)[:MAX_READ]:
        loc, type_, msg = _entry(entry, data)
        found.setdefault(root + loc, []).append((type_, msg))
    problems = []
    outer = {loc[:i] for loc in found for i in range(len(loc))}
    for loc, entries in found.items():
        kinds = {type_ for type_, _ in entries}
        if kinds <= CONTENT_TYPES and loc in outer:
            continue  # the other branch of the union got further
        if len(kinds) > 1 and kinds <= CONTENT_TYPES:
            names = {"string_type": "text", "dict_type": "a JSON object", "list_type": "a JSON list"}
            *some, last = (name for kind, name in names.items() if kind in kinds)
            problems.append(problem(loc, f"Input should be {', '.join(some)} or {last}", "content_type"))
            continue
        problems += [problem(loc, msg, type_) for type_, msg in dict.fromkeys(entries)]
    return refusal(problems)


def _entry(entry: ErrorDetails, data: Any) -> tuple[Loc, str, str]:
    """One error of pydantic as location, type and message."""
    type_, context = entry["type"], entry.get("ctx", {})
    loc = _real(entry["loc"], data, type_)
    match type_:
        case "union_tag_not_found":
            return (*loc, _discriminator(context)), "missing", MESSAGES["missing"]
        case "union_tag_invalid":
            return (*loc, _discriminator(context)), type_, f"Input should be one of {context['expected_tags']}"
        case "too_short" | "too_long":
            word, limit = ("least", "min_length") if type_ == "too_short" else ("most", "max_length")
            items = "item" if context[limit] == 1 else "items"
            msg = f"Should have at {word} {context[limit]} {items}, has {context['actual_length']}"
        case "string_too_long":
            msg = f"Should have at most {context['max_length']} characters"
        case "value_error":
            msg = str(context["error"])
        case _:
            msg = MESSAGES.get(type_) or (entry["msg"] if type_ in SAFE else "Invalid value")
    return loc, type_, msg


def _discriminator(context: dict[str, Any]) -> str:
    return str(context["discriminator"]).strip("'")


def _real(loc: Loc, data: Any, type_: str) -> Loc:
    """The parts of a pydantic location that are keys and indices of the data; union tags and branch names fall out."""
    real: list[str | int] = []
    at = data
    for i, part in enumerate(loc):
        if part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int) and part < len(at):
            at = at[part]
        elif not (type_ == "missing" and i == len(loc) - 1):
            continue
        real.append(part)
    return tuple(real)


def refuse_infinite(value: Any, loc: Loc) -> None:
    """Raise ValidationError for a number that overflowed to infinity."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise invalid(loc, "Numbers must be finite", "finite_number")
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_infinite(item, (*loc, key) if len(loc) <= LOCATION_PARTS else loc)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_infinite(item, (*loc, index) if len(loc) <= LOCATION_PARTS else loc)
