"""The zoo of tokenizers, each built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from sakuradite.engine.tokenizer import FastTokenizer
from tests.engine.zoo import ZOO


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint folders (tokenizer and template alone) by name."""
    root = tmp_path_factory.mktemp("zoo")
    return {name: make(root / name) for name, make in ZOO.items()}


@pytest.fixture(scope="session")
def tokenizers(zoo: dict[str, Path]) -> dict[str, FastTokenizer]:
    """The zoo as the engine reads it."""
    return {name: FastTokenizer(folder) for name, folder in zoo.items()}
