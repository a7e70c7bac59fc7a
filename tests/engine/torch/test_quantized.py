"""Checkpoints that Transformers loads with their weights still packed: they stay packed and answer as it does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.gemma_quant import QuantizedLinear

from sakuradite.engine.torch import linear, loading
from tests.engine.torch.prompts import difference, group, loaded, plain, probabilities, tokens

HEAD = tokens(1, 5)


def pack(checkpoint: Path, packed: Path, bits: int) -> None:
    """A copy whose projections hold whole numbers of so many bits and a scale per row, in Gemma's own packing."""
    shutil.copytree(checkpoint, packed)
    weights = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        stem = name.removesuffix("weight")
        scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        whole = (weight / scale).round().to(torch.int8)
        weights[stem + "weight_scale"] = scale
        weights[stem + "weight"] = whole if bits == 8 else _joined(whole, bits)
        weights[stem + "input_activation_scale"] = torch.tensor(0.0)  # zero: activations are not rounded
        weights[stem + "output_activation_scale"] = torch.tensor(0.0)
    save_file(weights, packed / "model.safetensors", metadata={"format": "pt"})
    config = packed / "config.json"
    method = {"quant_method": "gemma", "num_bits": bits, "modules_to_not_convert": ["lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))


def _joined(whole: torch.Tensor, bits: int) -> torch.Tensor:
    """Several values per byte, the first in the lowest bits, stored without a sign."""
    each = 8 // bits
    parts = (whole + 2 ** (bits - 1)).to(torch.uint8).unflatten(1, (-1, each))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    joined: torch.Tensor = (parts << shifts).sum(-1, dtype=torch.uint8)
    return joined


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_weights_stay_packed_and_answer_as_transformers_does(
    bits: int, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    whole = tiny("gemma3_text")
    checkpoint = tmp_path / "packed"
    pack(whole, checkpoint, bits)
    backend = loaded(checkpoint)
    projections = [m for n, m in backend._model.named_modules() if n.endswith("_proj")]
    assert projections
    assert all(type(m) is QuantizedLinear and m.weight.dtype in (torch.uint8, torch.int8) for m in projections)
    assert backend.facts.layout == "packed", backend.facts.layout_reason
    assert backend.facts.weight_bytes < loaded(whole).facts.weight_bytes

    backend.set_head(HEAD)
    asked = [group(2, 40, (3, 21, 1, 8), HEAD), group(3, 4, (5,), HEAD), group(4, 12, (6, 18))]
    for answered, request in zip(probabilities(backend, *asked), asked, strict=True):
        assert difference(answered, plain(checkpoint, "float32", request)) < 1e-5
        assert (
            difference(answered, plain(whole, "float32", request)) > 1e-5
        )  # the rounding shows: these are its weights


def test_weights_that_transformers_unpacks_are_said_to_be(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does with FP8 on a CPU: right answers from more memory than the files suggest."""
    checkpoint = tmp_path / "packed"
    pack(tiny("gemma3_text"), checkpoint, 8)
    native = loading.load_model

    def unpacking(*arguments: Any) -> Any:
        model = native(*arguments)
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantizedLinear):
                dense = torch.nn.Linear(module.in_features, module.out_features, bias=False)
                dense.weight = torch.nn.Parameter(module._dequantize_weights(torch.float32), requires_grad=False)
                model.set_submodule(name, dense)
        del model.config.quantization_config
        return model

    assert loaded(checkpoint).facts.warnings == ()
    monkeypatch.setattr(loading, "load_model", unpacking)
    backend = loaded(checkpoint)
    assert "stored as gemma" in backend.facts.warnings[0]
    assert "unpacked them to float32" in backend.facts.warnings[0]
    assert isinstance(backend._model.model.layers[0].mlp.up_proj, linear.PackedLinear)
    request = group(2, 20, (3, 8))
    assert difference(probabilities(backend, request)[0], plain(checkpoint, "float32", request)) < 1e-5
