"""Which layout a configuration gets and why, and that a layout which answers wrongly is not used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sakuradite.engine.torch import attention
from sakuradite.engine.torch.eligibility import decide
from tests.engine.torch.prompts import difference, group, loaded, plain, probabilities


class Config(SimpleNamespace):
    """A configuration whose class knows sliding windows and kinds of layers, as those of models that have them do."""

    sliding_window: int | None = None
    layer_types: list[str] | None = None


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
CASES: list[tuple[str, dict[str, Any], torch.dtype, str, str]] = [
    ("full attention", {}, torch.bfloat16, "packed", "full attention"),
    ("sliding window everywhere", {"sliding_window": 4096}, torch.float16, "packed", "sliding-window"),
    (
        "sliding window switched off",
        {"sliding_window": 9, "use_sliding_window": False},
        torch.float32,
        "packed",
        "full",
    ),
    ("mixed", {"layer_types": ["sliding_attention", "full_attention"]}, torch.float32, "packed", "sliding-window"),
    ("longrope", {"rope_parameters": LONGROPE}, torch.float32, "packed", "full attention"),
    ("yarn", {"rope_parameters": {"rope_type": "yarn"}}, torch.float32, "packed", "full attention"),
    ("dynamic rotary", {"rope_parameters": {"rope_type": "dynamic"}}, torch.float32, "padded", "dynamic"),
    (
        "dynamic rotary in one kind of layer",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        torch.float32,
        "padded",
        "dynamic",
    ),
    ("chunked attention", {"layer_types": ["chunked_attention"]}, torch.float32, "padded", "chunked_attention"),
    ("shared keys and values", {"num_kv_shared_layers": 2}, torch.float32, "padded", "share keys"),
    ("no shared layers after all", {"num_kv_shared_layers": 0}, torch.float32, "packed", "full attention"),
    ("quantised cache", {"cache_implementation": "quantized"}, torch.float32, "padded", "quantised"),
    ("bidirectional", {"is_causal": False}, torch.float32, "padded", "not causal"),
    ("validated hybrid", {"model_type": "qwen3_5_text"} | HYBRID, torch.float16, "cloned", "validated"),
    ("validated hybrid in bfloat16", {"model_type": "qwen3_5_text"} | HYBRID, torch.bfloat16, "padded", "bfloat16"),
    ("other hybrid", {"model_type": "qwen3_next"} | HYBRID, torch.float32, "padded", "not among"),
    ("recurrent by its settings", {"model_type": "rwkv_like", "state_size": 16}, torch.float32, "padded", "recurrent"),
    (
        "hybrid with rotary that depends on length",
        {"model_type": "lfm2", "rope_parameters": LONGROPE} | HYBRID,
        torch.float32,
        "padded",
        "depend on the length",
    ),
]


@pytest.mark.parametrize(("settings", "dtype", "layout", "because"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_decisions(settings: dict[str, Any], dtype: torch.dtype, layout: str, because: str) -> None:
    config = Config(**({"model_type": "some", "max_position_embeddings": 8192} | settings))
    decision = decide(config, dtype, pluggable=True)
    assert decision.layout == layout, decision.reason
    assert because in decision.reason


def test_attention_that_cannot_be_replaced() -> None:
    decision = decide(SimpleNamespace(model_type="some"), torch.float32, pluggable=False)
    assert decision.layout == "padded"
    assert "cannot be replaced" in decision.reason


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
@pytest.mark.parametrize("fault", ["wrong", "raising"])
def test_a_layout_that_fails_its_probe_is_not_used(
    architecture: str, fault: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that differ, or an error, at load: the plain layout, the reason told, and right answers."""
    from transformers import DynamicCache

    def nothing(*_: Any, **__: Any) -> None:
        if fault == "raising":
            raise TypeError("not in this release")

    checkpoint = tiny(architecture)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "merge", nothing)  # suffixes no longer see their prefix
        patch.setattr(DynamicCache, "reorder_cache", nothing)
        backend = loaded(checkpoint)
    assert backend.facts.layout == "padded"
    assert "probe" in backend.facts.layout_reason
    asked = group(2, 12, (5, 3))
    assert difference(probabilities(backend, asked)[0], plain(checkpoint, "float32", asked)) < 1e-5
