"""What is installed and what it runs on, faked where only a Mac could show it."""

from __future__ import annotations

import importlib
import inspect
import resource
from typing import Any

import pytest

from sakuradite.engine.mlx import runtime
from sakuradite.errors import (
    ConfigurationError,
    InsufficientResourcesError,
    MissingExtraError,
    UnsupportedModelError,
)

pytest.importorskip("mlx.core", reason="needs the extra [mlx]")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.31.3", (0, 31, 3)), ("0.32.0.dev20261101", (0, 32, 0)), ("1.0rc1", (1, 0)), ("0.32.2+cpu", (0, 32, 2))],
)
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, text: str, numbers: tuple[int, ...]) -> None:
    monkeypatch.setattr(runtime, "version", lambda _: text)
    assert runtime.installed("mlx-lm") == numbers


def test_a_missing_library_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'sakuradite\[mlx\]'"):
        runtime.require("mlx-nowhere", (0, 1))


def test_an_old_library_says_which_version_is_needed() -> None:
    with pytest.raises(ConfigurationError, match=r"needs mlx-lm 99\.1 or newer and found 0\.\d+"):
        runtime.require("mlx-lm", (99, 1))


@pytest.mark.parametrize("old", [(0, 31, 3), (0, 31), (0, 28, 1)])
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text", "qwen3_5_moe"])
def test_qwen3_5_is_refused_with_the_defective_mlx_lm(
    monkeypatch: pytest.MonkeyPatch, old: tuple[int, ...], model_type: str
) -> None:
    monkeypatch.setattr(runtime, "installed", lambda _: old)
    with pytest.raises(UnsupportedModelError, match=r"normalise its recurrent .* wrongly; use backend torch"):
        runtime.require_for(model_type)
    with pytest.raises(ConfigurationError, match=r"needs mlx-lm 0\.32\.2 or newer"):
        runtime.require_for("qwen3")
    monkeypatch.setattr(runtime, "installed", lambda _: (0, 32, 2))
    runtime.require_for(model_type)


def test_importing_mlx_lm_leaves_the_limit_of_open_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = runtime.library("mlx_lm.utils")
    assert "resource.setrlimit(" in inspect.getsource(utils)  # else the shield has nothing left to do
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(runtime, "import_module", lambda _: importlib.reload(utils))
    runtime.library.__wrapped__("mlx_lm.utils")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert resource.setrlimit.__module__ == "resource"  # put back


def test_the_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "has_metal", lambda: False)
    for device in ("mps", "metal", "gpu"):
        with pytest.raises(InsufficientResourcesError, match="needs an Apple GPU"):
            runtime.choose_device(device)
    assert runtime.choose_device("auto") == runtime.choose_device("cpu") == "cpu"
    with pytest.raises(ConfigurationError, match="'cuda:0' is not MLX's: it knows auto, cpu and mps"):
        runtime.choose_device("cuda:0")


def test_the_gpu_is_taken_on_a_mac_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    chosen: list[Any] = []
    monkeypatch.setattr(runtime, "has_metal", lambda: True)
    monkeypatch.setattr(mx, "set_default_device", chosen.append)
    assert [runtime.choose_device(device) for device in ("auto", "mps", "cpu")] == ["metal", "metal", "cpu"]
    assert chosen == [mx.gpu, mx.gpu, mx.cpu]


@pytest.mark.parametrize(
    ("error", "memory"),
    [  # as MLX words them on a Mac
        (
            RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum"),
            True,
        ),
        (RuntimeError("[malloc_or_wait] Unable to allocate 9 bytes."), True),
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008)"), True),
        (RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error"), False),
        (ValueError("unable to allocate"), False),
    ],
)
def test_want_of_memory_is_told_from_other_failures(error: Exception, memory: bool) -> None:
    assert runtime.is_out_of_memory(error) is memory


def test_caches_may_hold_what_was_set_or_an_eighth_of_the_memory() -> None:
    assert runtime.cache_bytes(12345) == 12345
    assert 1 << 27 < runtime.cache_bytes(None) < 1 << 42
