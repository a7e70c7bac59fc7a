"""The strings that stand under a class's fields in its source, as descriptions for the API reference."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Mapping


def field_docstrings(cls: type) -> dict[str, str]:
    """The docstring of each annotated field of a class and its bases, where there is one."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= _of_module(base.__module__).get(base.__name__, {})
    return found


@functools.cache
def _of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """Field docstrings by class for a module of this package; nothing is read of other packages."""
    if not name.startswith("sakuradite."):
        return {}
    classes: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[name])).body:
        if isinstance(node, ast.ClassDef):
            fields = classes.setdefault(node.name, {})
            for line, below in zip(node.body, node.body[1:], strict=False):
                match line, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=field)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        fields[field] = inspect.cleandoc(text)
    return classes
