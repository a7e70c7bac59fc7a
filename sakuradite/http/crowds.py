"""Bodies with far too many members, refused before they are validated.

Pydantic keeps an error for every member that is wrong: millions of unknown fields in one body would cost gigabytes and
stop the server for seconds. Here only lengths are looked at, so a valid request pays microseconds.
"""

from __future__ import annotations

from typing import Any

from sakuradite.http.problems import Loc, invalid
from sakuradite.questions import MAX_OPTIONS

MAX_FIELDS = 64  # of an object whose fields are known; the largest has eight
MAX_QUESTIONS = 10_000  # of a body; how many a model takes is its own setting, 400 by default
MAX_ITEMS = 10_000  # of a conversation, and of the parts of one message

CANDIDATES = ("criteria", "choices", "levels")
PARTS = ("content", "output", "instructions")


def refuse_crowds(data: Any) -> None:
    """Raise ValidationError where an object or a list has more members than any request of ours can need."""
    if not isinstance(data, dict):
        return
    _fields(data, ("body",))
    for name, limit in (("questions", MAX_QUESTIONS), ("input", MAX_ITEMS), ("assets", MAX_FIELDS)):
        if isinstance(members := data.get(name), dict | list):
            _length(members, limit, ("body", name))
            for key, member in members.items() if isinstance(members, dict) else enumerate(members):
                if isinstance(member, dict):
                    _member(member, ("body", name, key))


def _member(member: dict[str, Any], loc: Loc) -> None:
    """A question or an item, with the lists in it."""
    _fields(member, loc)
    for name in CANDIDATES:
        if isinstance(candidates := member.get(name), dict | list):
            _length(candidates, MAX_OPTIONS, (*loc, name))
            if isinstance(candidates, list) and name != "criteria":
                _objects(candidates, (*loc, name))
    for name in PARTS:
        # instructions of the native dialect are content: a list of anything
        if isinstance(parts := member.get(name), list) and isinstance(loc[-1], int):
            _length(parts, MAX_ITEMS, (*loc, name))
            _objects(parts, (*loc, name))


def _objects(members: list[Any], loc: Loc) -> None:
    for i, member in enumerate(members):
        if isinstance(member, dict):
            _fields(member, (*loc, i))


def _fields(data: dict[str, Any], loc: Loc) -> None:
    if len(data) > MAX_FIELDS:
        raise invalid(loc, f"Should have at most {MAX_FIELDS} fields, has {len(data)}", "too_long")


def _length(members: dict[str, Any] | list[Any], limit: int, loc: Loc) -> None:
    if len(members) > limit:
        raise invalid(loc, f"Should have at most {limit} items, has {len(members)}", "too_long")
