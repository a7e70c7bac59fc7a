"""Bytes that are predicted, held against what tensors take, and a batch that would not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sakuradite.engine.backend import OutOfDeviceMemory
from sakuradite.engine.torch import compiled, memory
from tests.engine.torch.prompts import group, loaded, probabilities, tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefix_takes_the_bytes_that_are_told(architecture: str, dtype: str, tiny: Callable[..., Path]) -> None:
    backend = loaded(tiny(architecture), dtype)
    asked = group(2, 40, (5,))
    probabilities(backend, asked)
    taken = sum(store.bytes for store in asked.prefix.cache.values())
    assert taken == 40 * backend._budget.sizes.cache_bytes_per_token


def test_weights_are_counted_once(tiny: Callable[..., Path]) -> None:
    """Packed layers as their plain ones, a tied head once; rotary tables come on top."""
    for tied in (False, True):
        facts = loaded(tiny("llama", config={"tie_word_embeddings": tied})).facts
        assert 4 * facts.parameters <= facts.weight_bytes <= 4 * facts.parameters + 1024


def test_more_rows_and_longer_ones_need_more(tiny: Callable[..., Path]) -> None:
    backend = loaded(tiny("llama"))

    def needed(state: int, questions: tuple[int, ...]) -> int:
        asked = group(2, state, questions)
        return backend.predicted_bytes([(asked.prefix, row) for row in asked.rows])

    assert backend.predicted_bytes([]) == 0
    assert needed(10, (5,)) < needed(10, (5, 5)) < needed(10, (5, 50)) < needed(1000, (5, 50))


def test_filler_tokens_are_counted(tiny: Callable[..., Path]) -> None:
    """A forward of 33 tokens that is filled up to 48 takes what one of 48 does."""
    sizes = loaded(tiny("llama"))._budget.sizes
    plain, filled = memory.Budget(sizes, 2048), memory.Budget(sizes, 2048, compiled.bucket)

    def needed(budget: memory.Budget, tokens: int) -> int:
        asked = group(2, 0, (tokens,))
        return budget.predict([(asked.prefix, row) for row in asked.rows], "packed", 0)

    assert compiled.bucket(33) == 48
    assert needed(plain, 33) < needed(filled, 33)
    assert sizes.forward_bytes(48, 1, 33) == needed(filled, 33)


def test_a_batch_that_cannot_fit_is_not_begun(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine halves it; a part that fits is answered."""
    backend = loaded(tiny("llama"))
    backend.set_head(tokens(1, 4))
    asked, half = group(2, 300, (5, 5, 200)), group(2, 300, (5,))
    between = backend.predicted_bytes([(asked.prefix, row) for row in asked.rows]) - 1
    monkeypatch.setattr(memory, "free_bytes", lambda _: between)
    with pytest.raises(OutOfDeviceMemory, match="free"):
        backend.score([asked])
    assert asked.prefix.cache is None
    probabilities(backend, half)


def test_free_memory_of_this_machine() -> None:
    assert 1 << 20 < memory.free_bytes(CPU) < 1 << 50


def test_files_that_a_container_has_cached_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory._container_rest() == 1 << 62
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 500\nactive_file 150\n")
    assert memory._container_rest() == 750
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_rest() == 1 << 62
