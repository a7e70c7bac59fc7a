"""JSON as strict as the contract wants it, with the place of what is wrong.

jiter refuses duplicate keys, NaN, lone surrogates and bad UTF-8, keeps long integers whole and does not recurse into
100,000 brackets. Its messages quote keys, so they are replaced here.
"""

from __future__ import annotations

import re
from typing import Any

import jiter

from sakuradite.errors import ValidationError
from sakuradite.http.problems import invalid
from sakuradite.questions import MAX_DEPTH

PATH_PARTS = 6  # of the location of a syntax error: enough for an option of a question
MAX_SCANNED_BYTES = 1 << 20  # a body longer than this gets a position, but no path: finding it takes Python time

POSITION = re.compile(r"(?s)(?P<reason>.*) at line (?P<line>\d+) column (?P<column>\d+)$")
# A string that does not end is one token too: else each quote in it would be tried again, up to the end.
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+\\?(?:"|\Z)|[{}\[\],]', re.DOTALL)


def read_json(data: bytes) -> Any:
    """The value of a JSON text. Raises ValidationError with a location that holds no content but keys.

    A number that overflows, as 1e999, comes out as infinity; what reads it must refuse it.
    """
    try:
        return jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys")
    except ValueError as error:
        raise _explain(data, str(error)) from None


def _explain(data: bytes, message: str) -> ValidationError:
    """The located error for what jiter said."""
    if not data.strip():
        return invalid(("body",), "The body is empty; a JSON object is expected", "json_empty")
    if data.startswith(b"\xef\xbb\xbf"):
        return invalid(("body",), "The body starts with a byte order mark; send plain UTF-8", "json_byte_order_mark")
    match = POSITION.fullmatch(message)
    if match is None:
        return invalid(("body",), "Not valid JSON", "json_invalid")
    line, column = int(match["line"]), int(match["column"])
    offset = _offset(data, line, column)
    where = f"(line {line}, column {column})"
    loc = ("body", *_path(data, offset))
    reason = match["reason"]
    if reason.startswith("Detected duplicate key"):
        return invalid(loc, f"duplicate key {where}", "duplicate_key")
    if reason.startswith("recursion limit"):
        return invalid(loc, f"Nested deeper than {MAX_DEPTH} levels", "too_deep")
    if reason.startswith(("expected value", "invalid number")) and data[max(0, offset - 1) :].lstrip(b"-")[:1] in (
        b"N",
        b"I",
    ):
        return invalid(loc, f"Numbers must be finite {where}", "finite_number")
    if reason == "invalid unicode code point":
        return invalid(loc, f"Not valid UTF-8 {where}", "json_invalid")
    if "surrogate" in reason or "hex escape" in reason:
        return invalid(loc, f"A \\u escape is cut short or a lone surrogate {where}", "json_invalid")
    if reason.startswith("number out of range"):
        return invalid(loc, f"A number has more than 4300 digits {where}", "json_invalid")
    return invalid(loc, f"Not valid JSON: {reason} {where}", "json_invalid")


def _offset(data: bytes, line: int, column: int) -> int:
    start = 0
    for _ in range(line - 1):
        start = data.find(b"\n", start) + 1
    return min(len(data), start + column)


def _path(data: bytes, offset: int) -> tuple[str | int, ...]:
    """The keys and indices that lead to a byte of a JSON text, as far as it can be read."""
    if offset > MAX_SCANNED_BYTES:
        return ()
    stack: list[str | int] = []
    keys: list[bool] = []  # per open container: in an object, is a key expected next?
    for match in TOKEN.finditer(data, 0, offset):
        token = match[0]
        if token in (b"{", b"["):
            stack.append("" if token == b"{" else 0)
            keys.append(token == b"{")
        elif token in (b"}", b"]"):
            if stack:
                stack.pop()
                keys.pop()
        elif not stack:
            continue
        elif token == b",":
            if isinstance(top := stack[-1], int):
                stack[-1] = top + 1
            else:
                keys[-1] = True
        elif keys[-1]:
            stack[-1], keys[-1] = _key(token), False
    if stack and keys[-1]:  # broke off before a key
        stack.pop()
    return tuple(stack[:PATH_PARTS])


def _key(token: bytes) -> str:
    try:
        return str(jiter.from_json(token))
    except ValueError:
        return token[1:-1].decode(errors="replace")
