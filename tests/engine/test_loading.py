"""Which runtime loads a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sakuradite.config import ModelConfig
from sakuradite.engine import fake, loading
from sakuradite.engine.backend import Backend
from sakuradite.errors import ConfigurationError, MissingExtraError, ModelLoadFailedError, UnsupportedModelError

type Runtimes = Callable[..., list[str]]


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> Runtimes:
    """`runtimes("mlx torch", apple=True, mlx=error)`: what is installed, on which machine; the loads that are tried."""

    def make(installed: str, apple: bool, **errors: Exception) -> list[str]:
        loads: list[str] = []

        def runtime(name: str) -> SimpleNamespace:
            def load(config: ModelConfig, checkpoint: Path) -> Backend:
                loads.append(name.rpartition(".")[2])
                if loads[-1] in errors:
                    raise errors[loads[-1]]
                return fake.FakeBackend(fake.Options())

            return SimpleNamespace(load=load)

        def find(module: str) -> object:
            return module if module.removesuffix("_lm") in installed.split() else None

        monkeypatch.setattr("importlib.util.find_spec", find)
        monkeypatch.setattr("sys.platform", "darwin" if apple else "linux")
        monkeypatch.setattr("platform.machine", lambda: "arm64" if apple else "x86_64")
        monkeypatch.setattr("importlib.import_module", runtime)
        return loads

    return make


@pytest.mark.parametrize(
    ("asked", "installed", "apple", "tried"),
    [
        ("auto", "mlx torch", True, "mlx"),
        ("auto", "mlx torch", False, "torch"),
        ("auto", "torch", True, "torch"),
        ("auto", "mlx", False, "mlx"),
        ("auto", "mlx", True, "mlx"),
        ("auto", "", True, None),
        ("torch", "mlx torch", True, "torch"),
        ("mlx", "mlx torch", False, "mlx"),
        ("mlx", "torch", True, None),
        ("torch", "mlx", True, None),
    ],
)
def test_the_runtime_of_a_checkpoint(
    runtimes: Runtimes, asked: str, installed: str, apple: bool, tried: str | None
) -> None:
    loads = runtimes(installed, apple)
    config = ModelConfig.model_validate({"model": "m", "backend": asked})
    if tried is None:
        with pytest.raises(MissingExtraError):
            loading._runtime(config, Path("m"))
    else:
        assert loading._runtime(config, Path("m")).facts.warnings == ()
    assert loads == ([] if tried is None else tried.split())


REFUSALS = (
    UnsupportedModelError("gpt_oss is refused on MLX: no kernels"),
    ConfigurationError("the MLX backend needs mlx-lm 0.32.2 or newer and found 0.31"),
    MissingExtraError("The MLX backend", "mlx"),
)


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_what_mlx_refuses_on_a_mac_torch_runs_and_says_why(runtimes: Runtimes, error: Exception) -> None:
    loads = runtimes("mlx torch", True, mlx=error)
    (warning,) = loading._runtime(ModelConfig(model="m"), Path("m")).facts.warnings
    assert loads == ["mlx", "torch"]
    assert warning == f"backend auto took torch on this Mac, because MLX refused the model: {error}"


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("asked", "installed"), [("mlx", "mlx torch"), ("auto", "mlx")])
def test_the_refusal_stands_where_mlx_is_asked_for_or_alone(
    runtimes: Runtimes, asked: str, installed: str, error: Exception
) -> None:
    loads = runtimes(installed, True, mlx=error)
    with pytest.raises(type(error)) as caught:
        loading._runtime(ModelConfig.model_validate({"model": "m", "backend": asked}), Path("m"))
    assert (caught.value, loads) == (error, ["mlx"])


def test_a_load_that_fails_on_mlx_is_not_tried_again(runtimes: Runtimes) -> None:
    """Damaged weights are damaged for torch too, and a machine that is too small stays so."""
    loads = runtimes("mlx torch", True, mlx=ModelLoadFailedError("cut short"))
    with pytest.raises(ModelLoadFailedError, match="cut short"):
        loading._runtime(ModelConfig(model="m"), Path("m"))
    assert loads == ["mlx"]
