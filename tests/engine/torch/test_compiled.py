"""Compiling: sizes that come again, filler that changes no answer, and loads where it cannot be had."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sakuradite.config import ModelConfig
from sakuradite.engine import loading
from sakuradite.engine.torch import compiled
from sakuradite.engine.torch.packed import Packed
from sakuradite.errors import ConfigurationError
from tests.engine.torch.prompts import difference, group, loaded, plain, probabilities, tokens

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))
HEAD = tokens(1, 5)


@pytest.mark.parametrize(
    ("count", "size"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 80), (129, 160), (2000, 2048), (2049, 2560)]
)
def test_sizes(count: int, size: int) -> None:
    assert compiled.bucket(count) == size
    assert compiled.bucket(size) == size


def test_a_forward_is_little_filler() -> None:
    assert all(count <= compiled.bucket(count) <= 1.25 * count for count in range(64, 9000))
    sizes = compiled.buckets(2048)
    assert sizes[0] == 16
    assert sizes[-1] == 2048
    assert sizes == sorted({compiled.bucket(count) for count in range(1, 2049)})


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "phi3"])
def test_filler_changes_no_answer(architecture: str, tiny: Callable[..., Path]) -> None:
    """Forwards filled up to sizes, uncompiled: each is of such a size, and answers as a full forward does."""
    checkpoint = tiny(architecture)
    backend = loaded(checkpoint)
    layout = backend._layout
    assert isinstance(layout, Packed)
    layout._round_up = compiled.bucket
    seen: list[int] = []
    backend._model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    backend.set_head(HEAD)
    asked = [group(2, 40, (3, 21, 1, 8), HEAD), group(3, 4, (5,), HEAD), group(4, 12, (6, 18))]
    for answered, request in zip(probabilities(backend, *asked), asked, strict=True):
        assert difference(answered, plain(checkpoint, "float32", request)) < 1e-5
    assert seen
    assert seen == [compiled.bucket(count) for count in seen]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_layers_answer_alike(tiny: Callable[..., Path]) -> None:
    """And sizes that were not seen before compile nothing anew."""
    checkpoint = tiny("llama")
    backend = loaded(checkpoint, compile=True)
    assert backend.facts.layout == "packed", backend.facts.layout_reason
    assert backend._budget.round_up is compiled.bucket
    backend.set_head(HEAD)
    asked = [group(2, 40, (3, 21, 1, 8), HEAD), group(3, 4, (5,), HEAD)]
    for answered, request in zip(probabilities(backend, *asked), asked, strict=True):
        assert difference(answered, plain(checkpoint, "float32", request)) < 1e-5
    torch._dynamo.utils.counters.clear()
    more = group(5, 200, (30, 2), HEAD)
    assert difference(probabilities(backend, more)[0], plain(checkpoint, "float32", more)) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_a_layout_that_is_not_compiled_says_so(tiny: Callable[..., Path]) -> None:
    (note,) = loaded(tiny("bamba"), compile=True).facts.warnings
    assert "compile=True changes nothing" in note
    assert "padded" in note


@pytest.mark.parametrize(
    ("device", "missing", "said"),
    [(CPU, "compiler", "C++ compiler"), (CUDA, "triton", "Triton"), (MPS, "", "not on mps")],
)
def test_a_machine_that_cannot_compile(
    device: torch.device, missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        monkeypatch.setattr(compiled, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        compiled.check(device)
    assert "load without it" in str(caught.value)


def test_every_size_is_run_once_on_cuda() -> None:
    """So that its launches are recorded before a request comes."""
    seen: list[int] = []

    class Scorer:
        def set_head(self, tokens: Any) -> None: ...
        def release(self, prefix: Any) -> None: ...
        def score(self, rows: Any) -> list[Any]:
            seen.extend(len(row.suffix) for _, row in rows)
            return []

    compiled.warm_up(Scorer(), CPU, 2048)
    assert seen == []
    compiled.warm_up(Scorer(), CUDA, 2048)
    assert seen == compiled.buckets(2048)


@pytest.mark.parametrize("backend", ["fake", "mlx"])
def test_other_backends_refuse_it(backend: Any, tiny: Callable[..., Path]) -> None:
    config = ModelConfig(model="m", backend=backend, compile=True)
    with pytest.raises(ConfigurationError, match="backend='torch'"):
        loading.load(config, tiny("llama"))
