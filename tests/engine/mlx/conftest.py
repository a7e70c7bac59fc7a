"""Checkpoints of all families; tiny forwards are slower on several threads than on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.mlx.tiny import SETTINGS, WITH_TEXT_CONFIG, build_with_text_config


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def family(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`family("qwen3_5")`: a tiny checkpoint of an accepted `model_type`, built once."""
    built: dict[str, Path] = {}

    def checkpoint(model_type: str) -> Path:
        if model_type not in WITH_TEXT_CONFIG:
            return tiny(model_type, config=SETTINGS.get(model_type))
        if model_type not in built:
            built[model_type] = build_with_text_config(model_type, tmp_path_factory.mktemp("tiny") / model_type)
        return built[model_type]

    return checkpoint
