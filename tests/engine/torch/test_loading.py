"""Devices, dtypes, threads, and checkpoints that are refused with a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sakuradite.config import ModelConfig
from sakuradite.engine.torch import assembly, device, linear, load, loading
from sakuradite.errors import (
    ConfigurationError,
    InsufficientResourcesError,
    ModelLoadFailedError,
    UnsupportedModelError,
)
from tests.checkpoints import build

CPU = torch.device("cpu")


def refused(checkpoint: Path, **settings: Any) -> str:
    """The message with which a load is refused."""
    with pytest.raises((UnsupportedModelError, ModelLoadFailedError)) as caught:
        load(ModelConfig(model="m", device="cpu", num_cpus=1, **settings), checkpoint)
    return str(caught.value)


@pytest.fixture
def copied(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "llama"))


def edit(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("asked", ["gpu", "cuda:x", "cpu:1", "mps:0", ""])
def test_a_word_that_names_no_device(asked: str) -> None:
    with pytest.raises(ConfigurationError, match="use auto, cpu, cuda, cuda:N or mps"):
        device.pick_device(asked)


@pytest.mark.parametrize("asked", ["cuda:99", "mps"])
def test_a_device_that_is_not_here(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InsufficientResourcesError, match="this machine has cpu"):
        device.pick_device(asked)


@pytest.mark.parametrize(
    ("asked", "stored", "fast_bfloat16", "picked"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", True, torch.float32),
        ("auto", None, True, torch.float32),
        ("auto", "float32", True, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
    ],
)
def test_dtypes_on_a_cpu(
    asked: str, stored: str | None, fast_bfloat16: bool, picked: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gains_by_bfloat16", lambda: fast_bfloat16)
    assert device.pick_dtype(asked, stored, CPU) == picked


def test_weights_too_large_for_float32_stay_in_bfloat16_and_say_so(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("llama", bfloat16 := copied.parent / "bfloat16", dtype="bfloat16")
    monkeypatch.setattr(device, "gains_by_bfloat16", lambda: False)
    monkeypatch.setattr(assembly, "gains_by_bfloat16", lambda: False)
    roomy = load(ModelConfig(model="m"), bfloat16).facts
    assert (roomy.dtype, roomy.warnings) == ("float32", ())
    monkeypatch.setattr(device, "free_bytes", lambda where: 1000)
    tight = load(ModelConfig(model="m"), bfloat16).facts
    assert tight.dtype == "bfloat16"
    assert "the weights stay in bfloat16, which this CPU computes more slowly" in tight.warnings[0]


@pytest.mark.parametrize(
    ("bfloat16", "float32", "gains"), [(0.001, 0.002, True), (0.0017, 0.002, False), (0.002, 0.001, False)]
)
def test_where_instructions_alone_do_not_tell_both_are_timed(
    bfloat16: float, float32: float, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(device, "_seconds", {torch.bfloat16: bfloat16, torch.float32: float32}.__getitem__)
    device.gains_by_bfloat16.cache_clear()
    assert device.gains_by_bfloat16() is gains
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    device.gains_by_bfloat16.cache_clear()
    assert not device.gains_by_bfloat16()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    device.gains_by_bfloat16.cache_clear()
    assert device.gains_by_bfloat16()
    device.gains_by_bfloat16.cache_clear()


def test_dtype_on_a_gpu_is_the_checkpoints_own() -> None:
    assert device.pick_dtype("auto", "float16", torch.device("cuda")) == torch.float16


@pytest.mark.parametrize(
    ("omp", "num_cpus", "threads"), [("3", 1, 3), ("", 2, 2), ("", 0.5, 1), ("junk", 1, 1), ("2,1", None, 2)]
)
def test_threads(omp: str, num_cpus: float | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    try:
        assert device.set_threads(ModelConfig(model="m", num_cpus=num_cpus)) == threads
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_code_of_the_repository_is_never_run(copied: Path) -> None:
    (copied / "modeling_own.py").write_text("raise SystemExit('repository code ran')")
    edit(
        copied,
        model_type="own_thing",
        auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"},
    )
    assert "code of its own, which is never run" in refused(copied)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert "no readable checkpoint" in refused(tmp_path)


def test_only_safetensors_are_read(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    torch.save({}, copied / "pytorch_model.bin")
    assert "no *.safetensors file" in refused(copied)


def test_a_broken_weights_file(copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{")
    assert "could not load" in refused(copied)


def test_an_encoder_is_no_causal_model(copied: Path) -> None:
    edit(copied, model_type="t5")
    assert "no causal language model" in refused(copied)


def test_packed_mxfp4_is_refused_off_cuda(copied: Path) -> None:
    """R11.10: Transformers would unpack it silently."""
    edit(copied, quantization_config={"quant_method": "mxfp4"})
    assert "MXFP4" in refused(copied)


@pytest.mark.parametrize(
    ("capability", "installed", "missing"),
    [
        ((7, 0), {"triton", "kernels"}, "compute capability"),
        ((9, 0), {"triton"}, "'kernels'"),
        ((9, 0), {"kernels"}, "'triton'"),
        ((9, 0), {"triton", "kernels"}, None),
    ],
)
def test_what_mxfp4_needs(
    capability: tuple[int, int], installed: set[str], missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(loading, "find_spec", lambda name: name if name in installed else None)
    found = loading.missing_for_mxfp4(torch.device("cuda"))
    assert (found is None) == (missing is None)
    assert missing is None or missing in str(found)


def test_packed_linear_layers_give_the_same_products() -> None:
    """And keep their weights readable, for the rare caller that looks."""
    if not linear.available(CPU, torch.float32):
        pytest.fail("this machine's torch has no oneDNN, which the CPU path relies on")
    plain = torch.nn.Linear(48, 33)
    packed = linear.PackedLinear(plain)
    x = torch.randn(2, 7, 48)
    assert torch.allclose(packed(x), plain(x), atol=1e-6)
    assert packed(x[:, :0]).shape == (2, 0, 33)
    assert torch.equal(packed.weight, plain.weight)


def test_a_tied_head_is_not_packed_twice(tiny: Callable[..., Path]) -> None:
    from tests.engine.torch.prompts import loaded

    backend = loaded(tiny("llama", config={"tie_word_embeddings": True}))
    model = backend._model
    assert isinstance(model.lm_head, linear.DenseLinear)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert isinstance(model.model.layers[0].mlp.up_proj, linear.PackedLinear)
