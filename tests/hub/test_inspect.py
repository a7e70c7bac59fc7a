"""Facts without weights: of folders, of stored models, of models on the hub, with and without runtimes."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from sakuradite.engine.mlx import runtime
from sakuradite.engine.torch import loading
from sakuradite.errors import ModelAccessDeniedError, ModelNotFoundError, OfflineMissingError, UnsupportedModelError
from sakuradite.hub import gguf, registry, smollm2, support, weights
from sakuradite.hub.inspect import inspect
from sakuradite.hub.remote import Hub
from sakuradite.hub.store import Store
from sakuradite.operations import BackendSupport, Inspection
from tests.hub.conftest import LLAMA, checkpoint, safetensors, sharded, write
from tests.hub.standin import StandIn

MODEL = "org/tiny"


def look(home: Path, standin: StandIn, files: dict[str, bytes] | None = None, **options: Any) -> Inspection:
    if files is not None:
        standin.add(MODEL, files)
    return inspect(MODEL, home=home, hub=Hub(standin.endpoint), **options)


def test_a_model_on_the_hub_is_described_from_its_small_files_and_the_heads_of_its_weights(
    home: Path, standin: StandIn
) -> None:
    files = sharded(count=3, weights=1_000_000)
    commit = standin.add(MODEL, files)
    found = look(home, standin)
    assert found == Inspection(
        model=MODEL,
        revision=commit,
        architecture="LlamaForCausalLM",
        model_type="llama",
        context_length=4096,
        vocabulary_size=512,
        dtype="bfloat16",
        weight_bytes=sum(len(data) for name, data in files.items() if name.endswith(".safetensors")),
        parameters=3_000_000,
        tokenizer="PreTrainedTokenizerFast",
        chat_template=True,
        prefix_reuse="packed: full attention in every layer",
        backends=found.backends,
        files={name: len(data) for name, data in files.items() if not name.endswith((".md", ".py"))},
    )
    assert found.backends["torch"] == BackendSupport(supported=True)
    assert found.calibrated is False
    assert not home.exists()
    ranges = {s.range for s in standin.seen if s.path.endswith(".safetensors")}
    assert ranges == {None, f"bytes=0-{weights.FIRST_READ - 1}"} - {None}


def test_stored_and_local_models_are_described_alike_and_without_a_network(
    home: Path, standin: StandIn, tmp_path: Path
) -> None:
    remote = look(home, standin, sharded())
    stored = Store(home, Hub(standin.endpoint)).pull(MODEL)
    standin.seen.clear()
    assert look(home, standin) == look(home, standin, offline=True) == remote
    assert standin.seen == []
    folder = write(tmp_path / "tiny", sharded())
    local = inspect(str(folder), home=home)
    assert local.model_copy(update={"model": MODEL, "revision": stored.revision}) == remote


def test_a_long_head_is_read_in_two_steps(home: Path, standin: StandIn) -> None:
    tensors = {f"layer.{n}.weight": ("BF16", [2]) for n in range(3000)}
    data = safetensors(tensors)
    assert int.from_bytes(data[:8], "little") > weights.FIRST_READ
    found = look(home, standin, checkpoint() | {"model.safetensors": data})
    assert found.parameters == 6000
    assert len([s for s in standin.seen if s.server == "cdn" and s.path.endswith("model.safetensors")]) == 2


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "qwen3_5_text", "mamba2", "gpt2"])
def test_real_tiny_checkpoints(tiny: Callable[..., Path], home: Path, architecture: str) -> None:
    folder = tiny(architecture)
    found = inspect(str(folder), home=home)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118  # no dict
    count = sum(math.prod(shape) for shape in shapes)
    config = json.loads((folder / "config.json").read_text())
    assert found.parameters == count
    assert found.dtype == "float32"
    assert found.weight_bytes == (folder / "model.safetensors").stat().st_size
    assert found.model_type == config["model_type"]
    assert found.architecture == config["architectures"][0]
    assert found.vocabulary_size == config["vocab_size"]
    assert found.context_length == config.get("max_position_embeddings", config.get("n_positions"))
    assert found.tokenizer is not None
    assert found.chat_template
    assert found.backends["torch"].supported


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": json.dumps(LLAMA).encode(), "pytorch_model.bin": b"x"}, "its weights are pickles"),
        ({"README.md": b"x"}, "it has no weights"),
        ({name: data for name, data in checkpoint().items() if name != "tokenizer.json"}, "it has no fast tokenizer"),
        (checkpoint() | {"config.json": b"{}"}, "its config.json names no model_type"),
        (checkpoint() | {"model.safetensors": b"cut off here"}, "model.safetensors is not a whole safetensors file"),
        (checkpoint() | {"model.safetensors": checkpoint()["model.safetensors"][:-1]}, "cut off"),
    ],
)
def test_what_no_backend_loads_says_why_for_each(
    home: Path, standin: StandIn, files: dict[str, bytes], reason: str
) -> None:
    found = look(home, standin, files)
    assert set(found.backends) == {"torch", "mlx"}
    for backend in found.backends.values():
        assert not backend.supported
        assert reason in (backend.reason or "")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mystery", "auto_map": {"AutoConfig": "c.C"}}, "custom code is not run"),
        ({"model_type": "mystery"}, "does not know the model type 'mystery'"),
        ({"model_type": "siglip_vision_model"}, "'siglip_vision_model' has no causal language model"),
        (LLAMA | {"hidden_size": "many"}, "does not understand its config.json"),
        (
            LLAMA | {"quantization_config": {"quant_method": "mxfp4"}},
            "packed MXFP4 weights run only with native kernels on CUDA",
        ),
    ],
)
def test_what_torch_does_not_load(home: Path, standin: StandIn, config: dict[str, Any], reason: str) -> None:
    found = look(home, standin, checkpoint(config=config))
    assert not found.backends["torch"].supported
    assert reason in (found.backends["torch"].reason or "")


def test_mxfp4_is_accepted_where_its_kernels_are(home: Path, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "missing_for_mxfp4", lambda device: None)
    found = look(home, standin, checkpoint(config=LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert found.backends["torch"].supported
    assert found.quantization == "mxfp4"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LLAMA, "packed: full attention in every layer"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "padded: its rotary frequencies change"),
        (
            {"model_type": "qwen3_5_text", "dtype": "bfloat16"},
            "padded: its linear_attention layers keep the plain",
        ),
        ({"model_type": "qwen3_5_text", "dtype": "float16"}, "cloned: a validated hybrid layout"),
        (
            {"model_type": "mamba2", "dtype": "float32"},
            "padded: its linear_attention layers are not among",
        ),
    ],
)
def test_prefix_reuse(home: Path, standin: StandIn, config: dict[str, Any], says: str) -> None:
    assert (look(home, standin, checkpoint(config=config)).prefix_reuse or "").startswith(says)


@pytest.fixture
def mlx_lm(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, ...]], None]:
    """Let MLX seem to be installed, in a version; deciding what it can load imports nothing of it."""

    def install(version: tuple[int, ...]) -> None:
        monkeypatch.setattr(support, "_installed", lambda *packages: True)
        monkeypatch.setattr(runtime, "is_installed", lambda: True)
        monkeypatch.setattr(runtime, "installed", lambda package: version)

    return install


QWEN3_5 = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 512}


@pytest.mark.parametrize(
    ("version", "config", "reason"),
    [
        ((0, 32, 2), LLAMA, None),
        ((0, 32, 2), QWEN3_5, None),
        ((0, 31, 3), QWEN3_5, "Qwen3.5 is refused on MLX with mlx-lm 0.31.3"),
        ((0, 30, 0), LLAMA, "the MLX backend needs mlx-lm"),
        ((0, 32, 2), {"model_type": "gpt_bigcode"}, "gpt_bigcode is refused on MLX"),
        ((0, 32, 2), {"model_type": "llava", "vision_config": {}}, "llava is refused on MLX"),
        ((0, 32, 2), LLAMA | {"hidden_act": "relu"}, "hidden_act relu of this llama is refused on MLX"),
        ((0, 32, 2), LLAMA | {"hidden_size": "many"}, "does not understand its config.json"),
        ((0, 32, 2), LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}, "weights packed as mxfp4 are refused"),
        ((0, 32, 2), LLAMA | {"model_file": "own.py"}, "asks to run its own code"),
    ],
)
def test_what_mlx_loads(
    home: Path,
    standin: StandIn,
    mlx_lm: Callable[[tuple[int, ...]], None],
    version: tuple[int, ...],
    config: dict[str, Any],
    reason: str | None,
) -> None:
    mlx_lm(version)
    found = look(home, standin, checkpoint(config=config)).backends["mlx"]
    assert found.supported is (reason is None)
    assert reason is None or reason in (found.reason or "")


def test_nested_settings_of_an_image_model(home: Path, standin: StandIn) -> None:
    text = {"model_type": "gemma3_text", "vocab_size": 300, "sliding_window": 16}
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
        "torch_dtype": "float16",
    }
    found = look(home, standin, checkpoint(config=config))
    assert found.modalities == ("text", "image")
    assert found.vocabulary_size == 300
    assert found.context_length == 131072, "the default of its class, which config.json leaves out"
    assert found.dtype == "float16"
    assert found.prefix_reuse == "packed: sliding-window and full attention"


def test_without_a_runtime_the_facts_are_there_and_the_extras_are_named(
    home: Path, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    hidden = {"torch", "transformers", "mlx", "mlx_lm"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in hidden else find(name, *a))
    registry.transformers_registry.cache_clear()
    try:
        found = look(home, standin, checkpoint())
    finally:
        registry.transformers_registry.cache_clear()
    assert (found.parameters, found.context_length, found.dtype) == (20_000, 4096, "bfloat16")
    for name in ("torch", "mlx"):
        assert not found.backends[name].supported
        assert f"pip install 'sakuradite[{name}]'" in (found.backends[name].reason or "")
    assert found.prefix_reuse == "not known here: deciding it needs the extra [torch]"


def test_the_module_needs_no_runtime_to_be_imported() -> None:
    script = (
        "import sys, sakuradite.hub.inspect; print(sorted({'torch','transformers','mlx','ray'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True)
    assert result.stdout.strip() == "[]"


PACKED: dict[str, tuple[dict[str, Any], dict[str, tuple[str, list[int]]], int, str]] = {
    "gptq": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"a.qweight": ("I32", [8, 16]), "a.qzeros": ("I32", [1, 2]), "a.scales": ("F16", [1, 16]),
         "a.g_idx": ("I32", [64]), "norm.weight": ("F16", [10])},
        8 * 16 * 8 + 10, "gptq 4-bit",
    ),
    "awq": (
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"a.qweight": ("I32", [8, 16]), "a.qzeros": ("I32", [1, 2]), "a.scales": ("F16", [1, 16])},
        1024, "awq 4-bit",
    ),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"a.weight": ("U8", [50, 1]), "a.weight.absmax": ("U8", [2]), "a.weight.quant_map": ("F32", [16]),
         "a.weight.quant_state.bitsandbytes__nf4": ("U8", [90]), "norm.weight": ("BF16", [10])},
        110, "bitsandbytes 4-bit",
    ),
    "mxfp4": (
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"mlp.gate_up_proj_blocks": ("U8", [2, 3, 16]), "mlp.gate_up_proj_scales": ("U8", [2, 3]),
         "norm.weight": ("BF16", [10])},
        2 * 2 * 3 * 16 + 10, "mxfp4",
    ),
    "fp8": (
        {"quantization_config": {"quant_method": "fp8"}},
        {"a.weight": ("F8_E4M3", [8, 8]), "a.weight_scale_inv": ("F32", [1, 1])},
        64, "fp8",
    ),
    "compressed-tensors": (
        {"quantization_config": {"quant_method": "compressed-tensors",
                                 "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}},
        {"a.weight_packed": ("I32", [8, 8]), "a.weight_scale": ("BF16", [8, 1]), "a.weight_shape": ("I32", [2])},
        512, "compressed-tensors 4-bit",
    ),
    "mlx": (
        {"quantization": {"group_size": 64, "bits": 4, "b": {"group_size": 64, "bits": 8}}},
        {"a.weight": ("U32", [8, 8]), "a.scales": ("BF16", [8, 1]), "a.biases": ("BF16", [8, 1]),
         "b.weight": ("U32", [8, 8]), "b.scales": ("BF16", [8, 1]), "b.biases": ("BF16", [8, 1]),
         "norm.weight": ("BF16", [10])},
        512 + 256 + 10, "mlx 4-bit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", PACKED)
def test_parameters_of_packed_weights(method: str) -> None:
    config, tensors, count, name = PACKED[method]
    data = safetensors(tensors)
    head = weights.read_head("x", len(data), lambda start, stop: data[start:stop])
    assert weights.parameters(head, config) == count
    assert weights.quantization(config) == name


def _head(length: int, text: bytes = b"") -> bytes:
    return length.to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [b"", b"short", _head(99, b"{}"), _head(2, b"[]"), _head(1 << 60), _head(13, b'{"a": {"x":1}'),
     _head(16, b'{"a": {"x": 1}}\n')],
)  # fmt: skip
def test_heads_that_are_no_heads(data: bytes) -> None:
    with pytest.raises(UnsupportedModelError):
        weights.read_head("x", len(data), lambda start, stop: data[start:stop])


def test_errors_are_those_of_a_pull(home: Path, standin: StandIn) -> None:
    with pytest.raises(ModelNotFoundError, match="has no model 'org/tiny'"):
        look(home, standin)
    with pytest.raises(OfflineMissingError):
        look(home, standin, offline=True)
    standin.add(MODEL, sharded(), gated=True)
    with pytest.raises(ModelAccessDeniedError, match="is gated"):
        look(home, standin)
    with pytest.raises(ModelNotFoundError, match="has no revision 'v2'"):
        look(home, standin, revision="v2")


@pytest.mark.parametrize("refusal", [None, "its tokenizer cannot be rebuilt exactly"])
def test_a_gguf_file(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str | None) -> None:
    (path := tmp_path / "q4.gguf").write_bytes(b"GGUF")
    facts = gguf.GGUFFacts(
        architecture="LlamaForCausalLM", model_type="llama", context_length=8192, vocabulary_size=49152,
        quantization="Q4_1", dtype="bfloat16", weight_bytes=100, parameters=200, tokenizer="smollm",
        chat_template=True, refusal=refusal,
    )  # fmt: skip
    monkeypatch.setattr(gguf, "inspect", lambda path: facts)
    found = inspect(str(path), home=home)
    assert found == Inspection(
        model=str(path),
        architecture="LlamaForCausalLM",
        model_type="llama",
        context_length=8192,
        vocabulary_size=49152,
        dtype="bfloat16",
        quantization="Q4_1",
        weight_bytes=100,
        parameters=200,
        tokenizer="smollm",
        chat_template=True,
        prefix_reuse="packed: full attention in every layer" if refusal is None else None,
        backends=found.backends,
        files={"q4.gguf": 4},
    )
    assert found.backends["torch"] == BackendSupport(supported=refusal is None, reason=refusal)


def test_the_packaged_gguf_file(home: Path) -> None:
    found = inspect(str(smollm2.packaged_file()), home=home)
    assert (found.model_type, found.parameters, found.tokenizer) == ("llama", 134_515_008, "smollm")
    assert found.backends["torch"].supported


def test_other_files_and_revisions_of_local_things(home: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"neither a checkpoint folder nor a \.gguf file"):
        inspect(str(tmp_path / "weights.bin"), home=home)
    with pytest.raises(UnsupportedModelError, match="has no revisions"):
        inspect(str(tmp_path), revision="main", home=home)
