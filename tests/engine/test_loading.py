"""Which runtime loads a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sakuradite.config import ModelConfig
from sakuradite.engine import fake, loading
from sakuradite.engine.backend import Backend
from sakuradite.errors import MissingExtraError, UnsupportedModelError


@pytest.mark.parametrize(
    ("asked", "installed", "apple", "refusing", "tried"),
    [
        ("auto", "mlx torch", True, "", "mlx"),
        ("auto", "mlx torch", True, "mlx", "mlx torch"),
        ("auto", "mlx torch", False, "", "torch"),
        ("auto", "torch", True, "", "torch"),
        ("auto", "mlx", False, "", "mlx"),
        ("auto", "", True, "", None),
        ("torch", "mlx torch", True, "", "torch"),
        ("mlx", "mlx torch", False, "", "mlx"),
        ("mlx", "torch", True, "", None),
        ("torch", "mlx", True, "", None),
    ],
)
def test_the_runtime_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, asked: str, installed: str, apple: bool, refusing: str, tried: str | None
) -> None:
    loads: list[str] = []

    def runtime(name: str) -> SimpleNamespace:
        def load(config: ModelConfig, checkpoint: Path) -> Backend:
            loads.append(name.rpartition(".")[2])
            if loads[-1] == refusing:
                raise UnsupportedModelError("not on this runtime")
            return fake.FakeBackend(fake.Options())

        return SimpleNamespace(load=load)

    def find(module: str) -> object:
        return module if module.removesuffix("_lm") in installed.split() else None

    monkeypatch.setattr("importlib.util.find_spec", find)
    monkeypatch.setattr("sys.platform", "darwin" if apple else "linux")
    monkeypatch.setattr("platform.machine", lambda: "arm64" if apple else "x86_64")
    monkeypatch.setattr("importlib.import_module", runtime)
    config = ModelConfig.model_validate({"model": "m", "backend": asked})
    if tried is None:
        with pytest.raises(MissingExtraError):
            loading._runtime(config, Path("m"))
    else:
        loading._runtime(config, Path("m"))
    assert loads == ([] if tried is None else tried.split())
