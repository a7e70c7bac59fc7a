"""Every architecture answers, with batching, prefix reuse and mixed requests, as a plain full forward does (R11.11)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sakuradite.engine.backend import Layout
from tests.checkpoints import ARCHITECTURES, LONGROPE_BOUNDARY
from tests.engine.torch.prompts import difference, group, loaded, plain, probabilities, tokens

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.015}
"""In bfloat16 twice the largest difference over 26 architectures with 30 questions each, 0.0074 (falcon_h1); there the
dtype itself moves a plain forward's probability by up to 0.029. See `tests.benchmarks.engine.rounding`."""
HYBRIDS = {"lfm2", "qwen3_5_text", "nemotron_h"}
RECURRENT = HYBRIDS | {"qwen3_next", "mamba2", "falcon_h1", "bamba", "granitemoehybrid"}
HEAD = tokens(1, 5)


def expected_layout(architecture: str, dtype: str) -> Layout:
    if architecture not in RECURRENT:
        return "packed"
    return "cloned" if architecture in HYBRIDS and dtype == "float32" else "padded"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_agree_with_a_plain_forward(architecture: str, dtype: str, tiny: Callable[..., Path]) -> None:
    """Short and long questions together; a state beyond the sliding windows of 16 and one within; a lone question."""
    checkpoint = tiny(architecture)
    backend = loaded(checkpoint, dtype)
    assert backend.facts.layout == expected_layout(architecture, dtype), backend.facts.layout_reason
    backend.set_head(HEAD)
    asked = [group(2, 40, (3, 21, 1, 8), HEAD), group(3, 4, (5,), HEAD), group(4, 12, (6, 18))]
    for answered, request in zip(probabilities(backend, *asked), asked, strict=True):
        assert difference(answered, plain(checkpoint, dtype, request)) < TOLERANCE[dtype]


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "mistral", "phi3"])
@pytest.mark.parametrize("window", [7, 64])
def test_sliding_windows_shorter_and_longer_than_the_prefix(
    architecture: str, window: int, tiny: Callable[..., Path]
) -> None:
    checkpoint = tiny(architecture, config={"sliding_window": window})
    backend = loaded(checkpoint)
    assert backend.facts.layout == "packed", backend.facts.layout_reason
    asked = [group(2, 40, (3, 12, 30)), group(3, 100, (9, 2))]
    for answered, request in zip(probabilities(backend, *asked), asked, strict=True):
        assert difference(answered, plain(checkpoint, "float32", request)) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "stray", "reason"),
    [
        ("llama", {"sliding_window": 64}, "full attention in every layer"),
        ("llama", {"layer_types": ["mamba", "sliding_attention"]}, "full attention in every layer"),
        ("mixtral", {"sliding_window": 64, "layer_types": ["full_attention"] * 2}, "sliding-window and full attention"),
    ],
)
def test_what_the_models_class_does_not_know_is_ignored(
    architecture: str, stray: dict[str, Any], reason: str, tiny: Callable[..., Path]
) -> None:
    """config.json may say it all the same, as converted ones do; longer than the probe, it goes unnoticed there."""
    checkpoint = tiny(architecture, config=stray)
    backend = loaded(checkpoint)
    assert backend.facts.layout_reason == reason
    request = group(2, 150, (3, 12))
    assert difference(probabilities(backend, request)[0], plain(checkpoint, "float32", request)) < 1e-5


@pytest.mark.parametrize("state", [LONGROPE_BOUNDARY - 30, LONGROPE_BOUNDARY - 4, LONGROPE_BOUNDARY + 10])
def test_longrope_on_both_sides_of_its_boundary(state: int, tiny: Callable[..., Path]) -> None:
    """Questions that end before, at and beyond the boundary: each answers by the frequencies of its own length."""
    checkpoint = tiny("phi3")
    backend = loaded(checkpoint)
    backend.set_head(HEAD)
    asked = [group(5, state - len(HEAD), (4, 3, 5, 40), HEAD), group(6, 10, (3,), HEAD)]
    for answered, request in zip(probabilities(backend, *asked), asked, strict=True):
        assert difference(answered, plain(checkpoint, "float32", request)) < 1e-5


def test_longrope_regimes_differ(tiny: Callable[..., Path]) -> None:
    """The boundary matters in this checkpoint: else the test above would pass without regimes."""
    scaled = tiny("phi3")
    short = tiny("phi3", config={"original_max_position_embeddings": 1000, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 1000}})  # fmt: skip
    request = group(5, LONGROPE_BOUNDARY, (4,))
    assert difference(plain(scaled, "float32", request), plain(short, "float32", request)) > 1e-3


def test_dynamic_rotary_answers_by_the_rows_own_length(tiny: Callable[..., Path]) -> None:
    """Dynamic NTK keeps frequencies of longer inputs seen before; a row must not answer by them."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    checkpoint = tiny("llama", config={"max_position_embeddings": 32, "rope_parameters": rope})
    backend = loaded(checkpoint)
    assert backend.facts.layout == "padded"
    assert "dynamic" in backend.facts.layout_reason
    fresh = loaded(checkpoint)
    request = group(7, 8, (30 - 8 + 1,))
    long = group(8, 20, (11,))
    alone = probabilities(fresh, request)[0]
    probabilities(backend, long)
    assert difference(probabilities(backend, long, request)[1], alone) < 1e-6


@pytest.mark.parametrize("variant", [{"pad_token": False}, {"adds_bos": True}, {"template": "thinking"}])
def test_variants_of_a_tokenizer_change_nothing(variant: dict[str, object], tiny: Callable[..., Path]) -> None:
    """Without a padding token padding is masked all the same."""
    for architecture in ("llama", "bamba"):
        checkpoint = tiny(architecture, **variant)
        request = group(2, 20, (3, 3, 9))
        answered = probabilities(loaded(checkpoint), request)[0]
        assert difference(answered, plain(checkpoint, "float32", request)) < 1e-5
