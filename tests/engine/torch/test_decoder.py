"""Decoder layers in fewer operators: the same answers where their form is known, and the plain ones back at need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sakuradite.engine.backend import Group, Prefix, Read, Row
from sakuradite.engine.torch import assembly, attention, decoder, linear, probe
from sakuradite.engine.torch.backend import TorchBackend
from sakuradite.engine.torch.decoder import FusedLayer
from tests.engine.torch.peak import peak_bytes
from tests.engine.torch.prompts import LABELS, difference, group, loaded, plain, probabilities, tokens

FUSED = ("llama", "mistral", "qwen2", "qwen3")
HEAD = tokens(1, 5)


def layers(backend: TorchBackend) -> list[Any]:
    return list(backend._model.model.layers)


def several_reads() -> Group:
    """Rows read in several places, in one, at their only token."""
    rows = [
        Row(tokens(s, n), tuple(Read(o, LABELS) for o in offsets))
        for s, (n, offsets) in enumerate([(9, (0, 4, 8)), (6, (2,)), (1, (0,)), (30, (29, 3, 29))])
    ]
    return Group(Prefix((*HEAD, *tokens(7, 40))), rows)


def read_all(backend: TorchBackend, *asked: Group) -> list[np.ndarray]:
    """The probabilities of every read of every row."""
    found = []
    for scores in backend.score(asked):
        for row in scores:
            assert not isinstance(row, Exception), row
            found += [np.exp(values.astype(np.float64)) for values in row]
    return found


@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_of_a_known_form_are_replaced(architecture: str, dtype: str, tiny: Callable[..., Path]) -> None:
    if not linear.available(torch.device("cpu"), getattr(torch, dtype)):
        pytest.skip("needs oneDNN's bfloat16")
    backend = loaded(tiny(architecture), dtype)
    assert backend.facts.layout == "packed"
    assert all(type(layer) is FusedLayer for layer in layers(backend))


@pytest.mark.parametrize("architecture", ["granite", "olmo2", "smollm3", "glm4", "ministral3", "gemma2", "qwen3_moe"])
def test_other_layers_are_left_alone(architecture: str, tiny: Callable[..., Path]) -> None:
    assert not any(isinstance(layer, FusedLayer) for layer in layers(loaded(tiny(architecture))))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("granite", {"residual_multiplier": 0.5}), ("gemma2", {}), ("smollm3", {"no_rope_layers": [0, 0]})],
)
def test_a_layer_that_answers_otherwise_is_left_alone(
    architecture: str, config: dict[str, Any], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were its class taken for one of this form, the comparison would tell."""
    name = type(layers(loaded(tiny(architecture, config=config)))[0]).__name__
    monkeypatch.setattr(decoder, "CLASSES", decoder.CLASSES | {name})
    assert not any(isinstance(layer, FusedLayer) for layer in layers(loaded(tiny(architecture, config=config))))


@pytest.mark.parametrize("flash_keys", [0, attention.FLASH_KEYS])
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"num_hidden_layers": 1}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 7}),
        ("mistral", {"sliding_window": 50}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_all_that_is_read_is_computed(
    architecture: str,
    config: dict[str, Any],
    flash_keys: int,
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the model's own layers; the last layer gives what is read and nothing else."""
    monkeypatch.setattr(attention, "FLASH_KEYS", flash_keys)
    checkpoint = tiny(architecture, config=config)
    backend = loaded(checkpoint)
    assert isinstance(layers(backend)[0], FusedLayer)
    monkeypatch.setattr(assembly, "fusible", lambda _: False)
    own = loaded(checkpoint)
    assert not isinstance(layers(own)[0], FusedLayer)
    for one in (backend, own):
        one.set_head(HEAD)
    found, expected = (read_all(one, several_reads(), group(3, 0, (4, 1))) for one in (backend, own))
    assert max(difference(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_row_of_one_token_answers_alone_as_in_company(kv_heads: int, dtype: str, tiny: Callable[..., Path]) -> None:
    """The last layer would multiply a single row there, which rounds otherwise than several."""
    if not linear.available(torch.device("cpu"), getattr(torch, dtype)):
        pytest.skip("needs oneDNN's bfloat16")
    backend = loaded(tiny("llama", config={"num_key_value_heads": kv_heads}), dtype)
    asked = group(4, 30, (1, 9, 5))
    alone = probabilities(backend, Group(Prefix(asked.prefix.tokens), asked.rows[:1]))[0][0]
    together = probabilities(backend, asked)[0][0]
    assert difference(alone, together) <= (1e-6 if dtype == "float32" else 0)


@pytest.mark.parametrize("architecture", FUSED)
def test_a_refused_layout_gets_its_layers_back(
    architecture: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, asked = tiny(architecture), group(2, 20, (3, 9))
    monkeypatch.setattr(probe, "disagreement", lambda *_: 1.0)
    backend = loaded(checkpoint)
    assert backend.facts.layout == "padded"
    assert not any(isinstance(module, FusedLayer) for module in backend._model.modules())
    assert difference(probabilities(backend, asked)[0], plain(checkpoint, "float32", asked)) < 1e-5


def test_a_layer_that_cannot_be_compared_stays_as_it_is(tiny: Callable[..., Path], monkeypatch: Any) -> None:
    def changed(layer: Any, last: bool) -> None:
        raise TypeError("forward() got an unexpected keyword argument")

    monkeypatch.setattr(decoder, "_fused", changed)
    backend = loaded(tiny("llama"))
    assert backend.facts.layout == "packed"
    assert not any(isinstance(module, decoder.FusedLayer) for module in backend._model.modules())


def test_a_fused_layer_needs_a_packed_forward(tiny: Callable[..., Path]) -> None:
    backend = loaded(tiny("llama"))
    with pytest.raises(RuntimeError, match="packed forward"):
        backend._model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_below_what_is_predicted(
    architecture: str, dtype: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the blocks of scores, whose bound is larger than all else of a tiny model."""
    from sakuradite.engine.torch import memory

    monkeypatch.setattr(memory, "BLOCK_SCORES", 10_000)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 10_000)
    backend = loaded(tiny(architecture), dtype)
    asked = group(2, 300, (60, 40, 70))
    predicted = backend.predicted_bytes([(asked.prefix, row) for row in asked.rows])
    taken = peak_bytes(lambda: probabilities(backend, asked))
    assert 0.1 * predicted < taken <= predicted
