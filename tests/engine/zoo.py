"""Small tokenizers of every make, as checkpoint folders without a model: what real ones do to text, in miniature."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.checkpoints import SENTENCES

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
CORPUS = (
    SENTENCES.splitlines()
    + [f"{a}{b} {a} {b} {i}" for i, (a, b) in enumerate(zip("ABCDEFGHIJ" * 30, "KLMNOPQRST" * 30, strict=True))]
    + ["Yes No yes no True False Answer: A\nAnswer: B\nQuestion: <s> </s> [INST] [/INST]"] * 9
)
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def _save(
    folder: Path,
    tokenizer: Any,
    template: str | None,
    markers: tuple[str, ...] = ("<think>", "<tool_call>", "<h1>", "\n\n\n", "caption"),
    **config: Any,
) -> Path:
    """Write the folder; `markers` are added as tokens that are not flagged as special, as Qwen does."""
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.enable_truncation(16)  # as some checkpoints are saved; it must not cut a prompt
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _byte_level(split: str | None, size: int, **level: Any) -> Any:
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=level.pop("add_prefix_space", False))]
    if split is not None:
        steps = [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, **level
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gpt2(folder: Path) -> Path:
    """Byte-level BPE that merges digits, no chat template."""
    return _save(folder, _byte_level(None, 900), None)


def qwen(folder: Path) -> Path:
    """Byte-level BPE, digits one by one, NFC, ChatML, markers that are not flagged as special."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = _byte_level(pattern, 500)
    tokenizer.normalizer = normalizers.NFC()
    return _save(folder, tokenizer, CHATML)


def llama3(folder: Path) -> Path:
    """Whole words of the vocabulary are taken without merges, one of them looking like a marker; BOS added."""
    tokenizer = _byte_level(r"\s?\S+|\s+", 700)
    state = json.loads(tokenizer.to_str())
    state["model"]["ignore_merges"] = True
    state["model"]["vocab"]["<|im_end|>"] = len(state["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(SPECIALS)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return _save(folder, tokenizer, "{{ bos_token }}" + CHATML)


def llama2(folder: Path) -> Path:
    """SentencePiece-style BPE: a space is put before every text, unknown characters fall back to bytes, BOS added."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*SPECIALS[:3], *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return _save(folder, tokenizer, LLAMA2)


def unigram(folder: Path) -> Path:
    """Unigram with a prefix space and NFKC, which makes markers of other characters after markers were looked for."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIALS[:3], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(folder, tokenizer, None)


def prefix_space(folder: Path) -> Path:
    """Byte-level BPE that puts a space before every text; BOS asked for by the configuration alone."""
    return _save(folder, _byte_level(None, 600, add_prefix_space=True), CHATML, add_bos_token=True)


def lowercase(folder: Path) -> Path:
    """Upper and lower case are the same to it."""
    tokenizer = _byte_level(None, 600)
    tokenizer.normalizer = normalizers.Lowercase()
    return _save(folder, tokenizer, CHATML)


def words(folder: Path) -> Path:
    """Whole words only, everything else unknown: it can tell few labels apart."""
    names = ["<unk>", "Answer", ":", "A", "B", "C", "Yes", "No", "the", "text", "?", "."]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _save(folder, tokenizer, None)


ZOO: dict[str, Callable[[Path], Path]] = {
    make.__name__: make for make in (gpt2, qwen, llama3, llama2, unigram, prefix_space, lowercase, words)
}
