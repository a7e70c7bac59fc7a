"""Fixtures that every folder of tests may use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("llama", template="thinking")`: a tiny checkpoint folder, built once per session and set of options."""
    built: dict[str, Path] = {}

    def checkpoint(architecture: str = "llama", **options: Any) -> Path:
        name = repr((architecture, sorted(options.items())))
        if name not in built:
            folder = tmp_path_factory.mktemp("tiny") / architecture  # the last part of the path names the model
            built[name] = build(architecture, folder, **options)
        return built[name]

    return checkpoint
