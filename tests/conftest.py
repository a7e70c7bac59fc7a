"""Fixtures that every folder of tests may use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build

TESTS = Path(__file__).parent
IN_ONE_PROCESS = (TESTS / "engine", TESTS / "benchmarks" / "quality")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers (`-n 2`) share the suite so that the engine's tests, arithmetic in one process, run beside all
    others, which start Ray and daemons and look at the machine's processes and ports: those stay in one worker."""
    for item in items:
        alone = any(item.path.is_relative_to(folder) for folder in IN_ONE_PROCESS)
        item.add_marker(pytest.mark.xdist_group("engine" if alone else "machine"))


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
