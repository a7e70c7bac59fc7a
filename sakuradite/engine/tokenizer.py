"""Text to tokens: a thin wrapper over a fast tokenizer that keeps the caller's text apart from control tokens.

It reads a checkpoint's `tokenizer.json` with the `tokenizers` library itself (Transformers takes seconds to import
and reads the same file), and belongs to the one worker thread of a model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sakuradite.engine.template import PLAIN, Frame, frame_of, read_json, read_template, turn_of
from sakuradite.errors import UnsupportedModelError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HTML = re.compile(
    r"</?(a|b|blockquote|body|br|caption|code|div|em|footer|h[1-6]|hr|html|i|li|ol|p|pre|s|span|strong|sub|sup|table"
    r"|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
LEAD = "\n"  # encoded in front of a piece that goes on, so that no tokenizer puts its start-of-text space there


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    frame: Frame
    """The text around the user's turn."""
    forbidden: frozenset[int]
    """Control tokens and the unknown token: never the result of a caller's text, never a label."""
    warnings: tuple[str, ...]

    def opening(self, text: str) -> list[int]:
        """The tokens of text of ours that starts a prompt, markers being control tokens; one BOS where one is due."""

    def control(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of text of ours that goes on inside a prompt, markers in it being control tokens."""

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of a caller's text that goes on inside a prompt: markers in it stay text."""


class FastTokenizer:
    """A `tokenizer.json`. Raises UnsupportedModelError where a checkpoint has none or it cannot be read."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Rust

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UnsupportedModelError(
                "the checkpoint has no fast tokenizer (tokenizer.json); only fast tokenizers are supported"
            )
        try:
            self._rust: Any = Rust.from_file(str(file))
        except Exception as error:  # the library raises the bare class
            raise UnsupportedModelError(f"tokenizer.json cannot be read: {error}") from None
        self._rust.no_truncation()
        self._rust.no_padding()

        config = read_json(folder / "tokenizer_config.json")
        specials = _special_tokens(folder, config)
        added: dict[int, Any] = self._rust.get_added_tokens_decoder()
        source = read_template(folder)
        self.warnings: tuple[str, ...] = ()
        if source is None:
            self.frame = PLAIN
            self.warnings = ("no chat template: prompts are plain text, as for a base model",)
        else:
            self.frame = frame_of(source, specials)
        self._template, self._specials = source, tuple(sorted(specials.items()))

        # `encode_special_tokens` leaves the markers of special tokens in text alone; other markers (Qwen's <tool_call>)
        # are not flagged as special, so flag them. Runs of blanks and tags of HTML (Gemma) stay what they are: text.
        written = " ".join([source or "", *specials.values()])
        markers = {i: token for i, token in added.items() if token.special or _is_marker(token.content, written)}
        self._rust.add_special_tokens(
            [
                AddedToken(
                    token.content,
                    special=True,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                )
                for token in markers.values()
                if not token.special
            ]
        )
        unknown = self._rust.token_to_id(getattr(self._rust.model, "unk_token", None) or specials.get("unk_token", ""))
        self.forbidden = frozenset(markers) | ({unknown} if unknown is not None else frozenset())
        self._control = frozenset(markers) - {unknown}
        self._leading = self._start_tokens(config, specials)
        self._rust.encode_special_tokens = True
        self._lead = self._ids([LEAD])[0] if self._ids(["a"])[0] != self._after(LEAD, "a") else []

    @property
    def largest_text_token(self) -> int:
        """The largest token id that text can give."""
        vocabulary: dict[str, int] = self._rust.get_vocab(with_added_tokens=True)
        return max(i for i in vocabulary.values() if i not in self._control)

    def turn(self, parts: tuple[bool, ...], placeholder: str) -> tuple[str, ...]:
        """The text around the parts of a user turn with images in it; see `template.turn_of`."""
        return turn_of(self._template, self._specials, parts, placeholder)

    def opening(self, text: str) -> list[int]:
        self._rust.encode_special_tokens = False
        try:
            ids = self._ids([text])[0]
        finally:
            self._rust.encode_special_tokens = True
        return ids if ids[: len(self._leading)] == self._leading else self._leading + ids

    def control(self, texts: Sequence[str]) -> list[list[int]]:
        self._rust.encode_special_tokens = False
        try:
            return self._going_on(texts)
        finally:
            self._rust.encode_special_tokens = True

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._going_on(texts)
        for i, ids in enumerate(found):
            if not self._control.isdisjoint(ids):
                found[i] = self._repaired(texts[i])
        return found

    def _going_on(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._lead:
            return self._ids(texts)
        lead, n = self._lead, len(self._lead)
        found = self._ids([LEAD + text for text in texts])
        return [ids[n:] if ids[:n] == lead else self._ids([texts[i]])[0] for i, ids in enumerate(found)]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [e.ids for e in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            # A panic in Rust comes as a BaseException, which would end the worker thread.
            raise RuntimeError("the tokenizer panicked") from None

    def _after(self, lead: str, text: str) -> list[int]:
        """The tokens of `text` when it follows `lead`, or those of both where they do not come apart."""
        before, both = self._ids([lead, lead + text])
        return both[len(before) :] if both[: len(before)] == before else both

    def _repaired(self, text: str) -> list[int]:
        """The tokens of a text whose plain characters give a control token (a whole word of the vocabulary, or after
        normalisation): cut inside the marker until they do not."""
        encoding = self._rust.encode(text, add_special_tokens=False)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._control:
                if end - start < 2:
                    return [i for i in encoding.ids if i not in self._control]  # one character: nothing to cut
                middle = (start + end) // 2
                return self.plain([text[:middle]])[0] + self.plain([text[middle:]])[0]
        return list(encoding.ids)

    def _start_tokens(self, config: dict[str, Any], specials: dict[str, str]) -> list[int]:
        """What the tokenizer puts at the start of every text: its BOS, or nothing."""
        bare = self._rust.encode("a", add_special_tokens=False).ids
        full = self._rust.encode("a", add_special_tokens=True).ids
        start = next((k for k in range(len(full)) if full[k : k + len(bare)] == bare), 0)
        bos = self._rust.token_to_id(specials["bos_token"]) if "bos_token" in specials else None
        if start == 0 and config.get("add_bos_token") and bos is not None:
            return [bos]
        if config.get("add_bos_token") is False:
            return []
        return list(full[:start])


def _is_marker(content: str, written: str) -> bool:
    """Whether an added token is a sign to the model rather than text: anything but blanks, a bare word or an HTML tag,
    and of these too what is `written` by the template or named as a special token."""
    text = content.strip()
    return bool(text) and (text in written or not (text.isalnum() or HTML.fullmatch(text)))


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a checkpoint as text, as its chat template sees them."""
    known = read_json(folder / "special_tokens_map.json") | config
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = known.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
