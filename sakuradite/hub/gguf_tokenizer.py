"""The fast tokenizer of a GGUF file, built only where it gives the original tokenizer's ids.

A GGUF file holds a vocabulary and merges, and names its pre-tokenizer (`tokenizer.ggml.pre`) without describing it.
Each pre-tokenizer here was compared with the original; a file that names another one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sakuradite.errors import UnsupportedModelError

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# Kinds of token in `tokenizer.ggml.token_type`.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


@dataclass(frozen=True, slots=True)
class _Family:
    """How one family cuts text before the merges: built lazily, for `tokenizers` is imported only when needed."""

    pre_tokenizer: Callable[[], Any]
    nfc: bool = False
    whole_words: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    adds_bos: bool = False
    """Whether the original adds its first token where the file does not say."""


def _byte_level(*before: Any, regex: bool = False) -> Any:
    from tokenizers import pre_tokenizers

    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    return pre_tokenizers.Sequence([*before, bytes_]) if before else bytes_


def _split(pattern: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    return _byte_level(pre_tokenizers.Split(Regex(pattern), "isolated"))


def _digits() -> Any:
    from tokenizers import pre_tokenizers

    return _byte_level(pre_tokenizers.Digits(individual_digits=True), regex=True)


FAMILIES: Mapping[str, _Family] = {
    "gpt-2": _Family(lambda: _byte_level(regex=True)),
    "smollm": _Family(_digits),
    "qwen2": _Family(lambda: _split(QWEN2_SPLIT), nfc=True),  # Qwen 2, 2.5 and 3
    "llama-bpe": _Family(lambda: _split(LLAMA3_SPLIT), whole_words=True, adds_bos=True),  # Llama 3 to 3.3
}


def refusal(fields: Mapping[str, Any]) -> str | None:
    """Why the original tokenizer of this file cannot be rebuilt exactly; None when it can."""
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model is None:
        return "it holds no tokenizer (tokenizer.ggml.model is missing)"
    known = ", ".join(FAMILIES)
    if model != "gpt2":
        return f"its tokenizer {model!r} cannot be rebuilt exactly; byte-level BPE ({known}) can"
    if pre not in FAMILIES:
        named = "names no pre-tokenizer" if pre is None else f"names the pre-tokenizer {pre!r}"
        return f"it {named}, whose token ids could differ from the original's; known are {known}"
    for key in ("tokens", "merges", "token_type"):
        if not fields.get(f"tokenizer.ggml.{key}"):
            return f"its tokenizer is incomplete (tokenizer.ggml.{key} is missing)"
    return None


def build(fields: Mapping[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` of the file. Raises UnsupportedModelError with the reason of `refusal`."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE

    if reason := refusal(fields):
        raise UnsupportedModelError(f"this GGUF file is refused: {reason}")
    family = FAMILIES[fields["tokenizer.ggml.pre"]]
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    # Unused entries only fill the embedding up to a round number; the original tokenizer does not have them.
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    merges = [tuple(line.split(" ", 1)) for line in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=family.whole_words))
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = family.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    for added, special in ((CONTROL, True), (USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=special)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == added
            ]
        )
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", family.adds_bos):
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=[(first, bos)]
        )
    return tokenizer


def settings(fields: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json: the named tokens, the context length and the chat template."""
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "padding_side": "right",
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            values[f"{key}_token"] = fields["tokenizer.ggml.tokens"][index]
    if template := fields.get("tokenizer.chat_template"):
        values["chat_template"] = template
    return values
