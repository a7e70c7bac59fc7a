"""GGUF files: the same logits and token ids as the original checkpoint, or a refusal that says why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from sakuradite.errors import InsufficientStorageError, ModelLoadFailedError, ModelNotFoundError, UnsupportedModelError
from sakuradite.hub import gguf, gguf_model
from sakuradite.operations import Progress

CORPUS = [
    "The customer's order 12345 hasn't arrived; they'll call 2024-05-17 at 10:30.",
    "  two  spaces,\ttabs\r\n\r\nand\n\n\nlines   \n",
    "naïve café, Caf\u0065\u0301 in NFD, ﬁ ligature, Ⅷ ½ ٣٤٥ 一二三 12",
    "日本語のテキスト。Привет, мир! שלום नमस्ते 👩‍👩‍👧 🇩🇪",
    "def f(x): return {'a': [1, 22, 333, 4444], \"b\": None}  # comment",
    "<|im_end|> <|not_special|> IT'S we'Re I'LL x'y",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
type Words = tuple[dict[str, int], list[tuple[str, str]]]


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Words:
    """A small byte-level vocabulary with merges, special tokens first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def original_qwen2(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(vocab=vocab, merges=merges, additional_special_tokens=SPECIAL)


def original_gpt2(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    from transformers import GPT2Tokenizer

    return GPT2Tokenizer(vocab=vocab, merges=merges, additional_special_tokens=SPECIAL)


def original_smollm(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """GPT-2 whose text is cut around every digit first, which is all that SmolLM's tokenizer adds to it."""
    gpt2 = original_gpt2(vocab, merges)

    def encode(text: str) -> list[int]:
        pieces, run = [], ""
        for character in text:
            if unicodedata.category(character).startswith("N"):
                pieces += [run, character]
                run = ""
            else:
                run += character
        return [i for piece in [*pieces, run] if piece for i in gpt2(piece)["input_ids"]]

    return lambda text: {"input_ids": encode(text)}


def original_llama3(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Llama 3's own pattern, as the converter in Transformers holds it."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    pattern = TikTokenConverter().pattern
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write(
    path: Path,
    model: Any,
    vocab: dict[str, int],
    merges: Sequence[tuple[str, str]],
    pre: str | None = "qwen2",
    architecture: str | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Callable[[GGUFWriter], None] | None = None,
    drop: str | None = None,
    add: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """A GGUF file of a Transformers model, laid out the way llama.cpp's converter does it."""
    config = model.config
    architecture = architecture or config.model_type
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config.vocab_size)]
    kinds = [3 if t in SPECIAL else 5 if i >= len(vocab) else 1 for i, t in enumerate(tokens)]
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    if edit is not None:
        edit(writer)
    old_names = {v: k for k, v in (gguf_model.LAYER | gguf_model.QUERY_KEY_NORMS).items()}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in model.state_dict().items():
        weight = value.numpy()
        top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        if name == "lm_head.weight":
            if config.tie_word_embeddings:
                continue
            key = "output.weight"
        elif name in top:
            key = top[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            stem, suffix = rest.rsplit(".", 1)
            key = f"blk.{layer}.{old_names[stem]}.{suffix}"
            if architecture == "llama" and old_names[stem] in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if old_names[stem] == "attn_q" else config.num_key_value_heads
                weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        tensors[key] = weight
    for key, weight in (tensors | (add or {})).items():
        if key == drop:
            continue
        if weight.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(key, quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SIZES = {
    "vocab_size": 608,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny(model_type: str, **changes: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # so that biases and norms are no constants
    return model


@pytest.fixture(scope="module")
def words() -> Words:
    from tokenizers import pre_tokenizers

    return trained(pre_tokenizers.ByteLevel(False))


def families() -> list[tuple[str, Callable[..., Any]]]:
    return [
        ("gpt-2", original_gpt2),
        ("smollm", original_smollm),
        ("qwen2", original_qwen2),
        ("llama-bpe", original_llama3),
    ]


@pytest.mark.parametrize(("pre", "original"), families())
def test_token_ids_equal_the_originals(pre: str, original: Callable[..., Any], words: Words, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path / "m.gguf", tiny("llama"), *words, pre=pre, edit=lambda w: w.add_add_bos_token(False))
    tokenizer = AutoTokenizer.from_pretrained(gguf.to_checkpoint(path, tmp_path))
    expected = original(*words)
    for text in CORPUS:
        assert tokenizer(text)["input_ids"] == expected(text)["input_ids"], text
    assert tokenizer.all_special_tokens
    assert len(tokenizer) == len(words[0])  # the unused entries of the embedding are no tokens


def test_a_first_token_is_added_where_the_original_adds_one(words: Words, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for pre, counted in (("llama-bpe", 1), ("qwen2", 0)):
        path = write(tmp_path / f"{pre}.gguf", tiny("llama"), *words, pre=pre, edit=lambda w: w.add_bos_token_id(0))
        tokenizer = AutoTokenizer.from_pretrained(gguf.to_checkpoint(path, tmp_path))
        assert tokenizer("order")["input_ids"].count(0) == counted
        assert tokenizer("order", add_special_tokens=False)["input_ids"].count(0) == 0


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "head_dim": 32, "rms_norm_eps": 1e-5}),
        ("qwen2", {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    ],
)
def test_logits_equal_the_originals(model_type: str, changes: dict[str, Any], words: Words, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = tiny(model_type, **changes)
    folder = gguf.to_checkpoint(write(tmp_path / "m.gguf", model, *words), tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == torch.float32  # a file of full precision keeps it
    ids = torch.arange(40)[None] * 13 % 600
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-6)


def test_llama3_rotary_scaling_is_recovered(words: Words, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny("llama", head_dim=64, rope_parameters=scaling, max_position_embeddings=131072)
    plain = 1 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert len(set(np.round(factors, 3))) > 3  # unscaled, between, and by the whole factor
    path = write(tmp_path / "m.gguf", model, *words, add={gguf_model.ROPE_FACTORS: factors})
    loaded = AutoModelForCausalLM.from_pretrained(gguf.to_checkpoint(path, tmp_path))
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)

    other = write(tmp_path / "o.gguf", model, *words, add={gguf_model.ROPE_FACTORS: factors[::-1].copy()})
    with pytest.raises(UnsupportedModelError, match="rotary factors"):
        gguf.to_checkpoint(other, tmp_path)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_precision_follows_the_file(kind: str, dtype: str, words: Words, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny("qwen2")
    path = write(tmp_path / "m.gguf", model, *words, kind=GGMLQuantizationType[kind])
    facts = gguf.inspect(path)
    assert (facts.quantization, facts.dtype, facts.refusal) == (kind, dtype, None)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.to_checkpoint(path, tmp_path))
    assert str(loaded.dtype) == f"torch.{dtype}"
    name = "model.layers.1.mlp.up_proj.weight"
    wanted, found = model.state_dict()[name], loaded.state_dict()[name].float()
    assert (found - wanted).abs().max() <= wanted.abs().max() * {"F32": 0, "F16": 1e-3}.get(kind, 8e-3)


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    import torch

    values = np.array([1.0, 1.00390625, 1.01171875, -3.1415927, 65504.0, 1e-40, 0.0, 3e38], np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.frombuffer(gguf._bytes(values, "bfloat16"), np.int16).tolist() == expected.tolist()


def test_inspect_reads_the_facts(words: Words, tmp_path: Path) -> None:
    model = tiny("qwen3", head_dim=32)
    facts = gguf.inspect(write(tmp_path / "m.gguf", model, *words, kind=GGMLQuantizationType.Q8_0))
    assert (facts.architecture, facts.model_type) == ("Qwen3ForCausalLM", "qwen3")
    assert (facts.context_length, facts.vocabulary_size) == (512, 608)
    assert facts.parameters == sum(p.numel() for n, p in model.named_parameters())
    assert facts.parameters < facts.weight_bytes < 1.2 * facts.parameters
    assert (facts.tokenizer, facts.chat_template, facts.refusal) == ("qwen2", True, None)


def unknown_tokenizer(writer: GGUFWriter) -> None:
    writer.kv_data[0]["tokenizer.ggml.model"].value = "llama"


@pytest.mark.parametrize(
    ("case", "arguments", "reason"),
    [
        ("pre-tokenizer", {"pre": "tekken"}, "names the pre-tokenizer 'tekken'.*known are gpt-2, smollm"),
        ("no pre-tokenizer", {"pre": None}, "names no pre-tokenizer"),
        ("sentencepiece", {"edit": unknown_tokenizer}, "tokenizer 'llama' cannot be rebuilt exactly"),
        ("architecture", {"architecture": "mamba"}, "architecture 'mamba' is not one of llama, qwen2, qwen3"),
        ("experts", {"edit": lambda w: w.add_expert_count(8)}, "mixture of experts"),
        ("rotary scaling", {"edit": lambda w: w.add_string("qwen2.rope.scaling.type", "yarn")}, "scaling 'yarn'"),
        ("partial rotary", {"edit": lambda w: w.add_rope_dimension_count(8)}, "only a part of each head"),
        ("missing tensor", {"drop": "blk.1.ffn_up.weight"}, "'blk.1.ffn_up.weight' is missing"),
        ("integers", {"add": {"output.weight": np.zeros((608, 64), np.int32)}}, "quantisation I32 cannot be read"),
        ("extra tensor", {"add": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}}, "'blk.0.attn_sinks.weight'"),
    ],
)
def test_refused_with_the_reason(
    case: str, arguments: dict[str, Any], reason: str, words: Words, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", tiny("qwen2"), *words, **arguments)
    with pytest.raises(UnsupportedModelError, match=reason):
        gguf.to_checkpoint(path, tmp_path / "home")
    assert not list((tmp_path / "home" / "converted").glob("[!.]*"))
    assert gguf.inspect(path).refusal is not None


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -1000])
def test_a_broken_file_is_refused(keep: int, words: Words, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny("qwen2"), *words)
    path.write_bytes(path.read_bytes()[:keep])
    for read in (gguf.inspect, lambda p: gguf.to_checkpoint(p, tmp_path)):
        with pytest.raises(UnsupportedModelError, match=r"m\.gguf is not a whole GGUF file"):
            read(path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(500))
    with pytest.raises(UnsupportedModelError, match="GGUF magic invalid"):
        gguf.inspect(path)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    for read in (gguf.inspect, lambda p: gguf.to_checkpoint(p, tmp_path)):
        with pytest.raises(ModelNotFoundError, match="No such file"):
            read(tmp_path / "nothing.gguf")


def test_converted_once_and_again_when_the_file_changes(words: Words, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny("qwen2"), *words)
    reports: list[Progress] = []
    first = gguf.to_checkpoint(path, tmp_path, reports.append)
    count = len(reports)
    assert count > 2
    assert gguf.to_checkpoint(path, tmp_path, reports.append) == first
    assert len(reports) == count
    os.utime(path, ns=(1, 1))
    assert gguf.to_checkpoint(path, tmp_path, reports.append) == first
    assert len(reports) == 2 * count
    other = tmp_path / "elsewhere" / "m.gguf"
    other.parent.mkdir()
    shutil.copy(path, other)
    assert gguf.to_checkpoint(other, tmp_path).name != first.name


def test_a_damaged_record_is_an_error_that_says_what_to_do(words: Words, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny("qwen2"), *words)
    folder = gguf.to_checkpoint(path, tmp_path)
    (folder / "source.json").write_text("{")
    with pytest.raises(ModelLoadFailedError, match="delete"):
        gguf.to_checkpoint(path, tmp_path)


def test_a_full_disk_is_said_before_writing(words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", tiny("qwen2"), *words)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(InsufficientStorageError, match="1000 are free"):
        gguf.to_checkpoint(path, tmp_path)
    assert not list((tmp_path / "converted").glob("[!.]*"))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, sakuradite.hub.gguf, sakuradite.hub.smollm2\n"
        "print([name for name in ('gguf', 'torch', 'tokenizers', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
