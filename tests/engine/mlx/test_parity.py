"""Every accepted family answers as PyTorch does on the same checkpoint in float32 (1e-4 on probabilities)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakuradite.engine.backend import Backend, Group, Prefix, Row
from sakuradite.engine.mlx import load
from sakuradite.engine.mlx.families import FAMILIES
from tests.engine.mlx.tiny import DEEPSEEK_YARN, SETTINGS, Reference, float32, row, tokens

pytest.importorskip("mlx.core", reason="needs the extra [mlx]")

TOLERANCE = 1e-4
NEARER = {"gemma": 2e-6, "gpt_neox": 2e-6}  # the two forms of GELU are near each other
HEAD = tokens(20, seed=1)
STATE = tokens(140, seed=2)


def differences(backend: Backend, reference: Reference, prefix: tuple[int, ...], rows: list[Row]) -> list[float]:
    """The largest difference of a probability at each read of each row."""
    group = Group(Prefix(prefix), rows)
    (scores,) = backend.score([group])
    backend.release(group.prefix)
    found = []
    for one, logs in zip(rows, scores, strict=True):
        assert isinstance(logs, tuple)
        expected = reference.probabilities(prefix + one.suffix)
        for read, log in zip(one.reads, logs, strict=True):
            found.append(float(np.abs(np.exp(log) - expected[len(prefix) + read.offset]).max()))
    return found


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_family_answers_as_pytorch_does(
    model_type: str, family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sakuradite.engine.mlx import text, vision

    tolerance = NEARER.get(model_type, TOLERANCE)
    folder = family(model_type)
    backend = load(float32(folder), folder)
    reference = Reference(folder)
    size = reference.vocabulary
    assert backend.facts.vocabulary_size == size
    short = [row(tokens(n, seed=n), vocabulary=size) for n in (1, 12, 70)]
    assert max(differences(backend, reference, (), short)) < tolerance
    backend.set_head(HEAD)
    behind = [row(tokens(n, seed=n), 0, -1, vocabulary=size) for n in (3, 40)]
    assert max(differences(backend, reference, HEAD + STATE, behind)) < tolerance
    for module in (text, vision):  # the same through the native cache, in steps
        monkeypatch.setattr(module, "PREFILL_STEP", 48)
    monkeypatch.setattr(vision, "PREFILL_TOKENS", 48)
    assert max(differences(backend, reference, HEAD + STATE, behind)) < tolerance
    assert max(differences(backend, reference, (), short)) < tolerance
    backend.close()


SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        (name, kind)
        for name, family in FAMILIES.items()
        for kind in sorted(SCALED)
        if family.rotary >= {"default", kind}
    ],
)
def test_scaled_rotary_embeddings_answer_as_pytorch_does(model_type: str, kind: str, tiny: Callable[..., Path]) -> None:
    rope = SCALED[kind] | {"rope_type": kind, "rope_theta": 20000.0}
    folder = tiny(model_type, config=SETTINGS.get(model_type, {}) | {"rope_parameters": rope})
    backend = load(float32(folder), folder)
    reference = Reference(folder)
    rows = [row(tokens(n, seed=n), vocabulary=reference.vocabulary) for n in (40, 300)]
    assert max(differences(backend, reference, (), rows)) < TOLERANCE


HUNYUAN_ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("deepseek_v2", {"q_lora_rank": 16, "topk_method": "greedy"}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN}),
        ("glm", {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 1.0}}),
        ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
        ("hunyuan_v1_dense", {"rope_parameters": HUNYUAN_ALPHA}),
        ("jamba", {"attn_layer_offset": 2, "attn_layer_period": 4, "expert_layer_offset": 0}),
        ("jamba", {"num_experts": 1, "num_experts_per_tok": 1}),
        ("starcoder2", {"tie_word_embeddings": True}),
    ],
)
def test_other_settings_of_a_family_answer_as_pytorch_does(
    model_type: str, more: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    folder = tiny(model_type, config=SETTINGS.get(model_type, {}) | more)
    backend = load(float32(folder), folder)
    reference = Reference(folder)
    rows = [row(tokens(n, seed=n), vocabulary=reference.vocabulary) for n in (40, 300)]
    assert max(differences(backend, reference, (), rows)) < TOLERANCE
