"""Labels: the short codes whose tokens are scored, chosen per model so that the tokenizer keeps each of them apart.

A label is clean when the prompt's tokens stay as they are and the label adds exactly one token (or two, where a
tokenizer has too few such codes for the options at hand). Found once per model and number of options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from string import ascii_lowercase, ascii_uppercase, digits

from sakuradite.engine.prompt import WORDING, Cue, Wording
from sakuradite.engine.tokenizer import Tokenizer
from sakuradite.errors import ValidationError
from sakuradite.records import Kind

PAIRS = tuple(a + b for a, b in product(ascii_uppercase, repeat=2))
NUMBERS = tuple(str(i) for i in range(1, 256))


@dataclass(frozen=True, slots=True)
class Labels:
    """Codes for the options of a question, in order, and the tokens that the model is asked about."""

    codes: tuple[str, ...]
    """As shown in the prompt."""
    closing: tuple[int, ...]
    """The tokens between the question and the label: the template's end of turn and the reply's first words."""
    paths: tuple[tuple[int, ...], ...]
    """Per code its tokens: one each, or two each."""

    firsts: tuple[int, ...] = field(init=False)
    """The distinct first tokens, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "firsts", tuple(dict.fromkeys(path[0] for path in self.paths)))


class LabelBook:
    """The labels of one model, by kind of question and number of options."""

    def __init__(self, tokenizer: Tokenizer, model: str, wording: Wording = WORDING) -> None:
        self._tokenizer = tokenizer
        self._wording = wording
        self._model = model
        self._found: dict[tuple[Kind, int], Labels] = {}
        self._tokens: dict[tuple[Cue, str], tuple[int, ...] | None] = {}
        cues = wording.cues
        self._closings = {
            cue: tuple(tokens)
            for cue, tokens in zip(cues, tokenizer.control([self._closing_text(cue) for cue in cues]), strict=True)
        }

    def labels(self, kind: Kind, count: int) -> Labels:
        """Labels for `count` options. Raises ValidationError when the tokenizer cannot tell that many apart."""
        key = (kind, count)
        if key not in self._found:
            self._found[key] = self._search(kind, count)
        return self._found[key]

    def _search(self, kind: Kind, count: int) -> Labels:
        most = 0
        for codes, length in self._alphabets(kind, count):
            for cue in self._wording.cues:
                clean = self._clean(cue, codes, length)
                if len(clean) >= count:
                    chosen = list(clean)[:count]
                    return Labels(tuple(chosen), self._closings[cue], tuple(clean[code] for code in chosen))
                most = max(most, len(clean))
        raise ValidationError(
            f"{self._model} can tell at most {most} options apart; the question has {count}", param="criteria"
        )

    def _alphabets(self, kind: Kind, count: int) -> Iterator[tuple[Sequence[str], int]]:
        """Sets of codes to try and the number of tokens each code may have, the best first."""
        wording = self._wording
        if kind == "noul" and wording.noul_names is None:
            for words in wording.noul_words:
                yield words, 1
        if kind == "noul" and wording.noul_names is not None and wording.noul_turned:
            yield wording.choice_codes[1::-1], 1  # the side that is named first has the first code
        yield (wording.score_codes if kind == "score" else wording.choice_codes)[:count], 1
        yield ascii_uppercase[:count], 1
        yield NUMBERS[:count], 1
        yield PAIRS, 1
        # Two tokens: few first ones, since each costs a row.
        yield [a + b for a, b in product(digits, ascii_uppercase)], 2
        yield [a + b for a, b in product(ascii_uppercase, digits)], 2
        yield [a + b for a, b in product(ascii_uppercase, repeat=2)], 2
        yield [a + b for a, b in product(ascii_lowercase + digits, repeat=2)], 2

    def _clean(self, cue: Cue, codes: Sequence[str], length: int) -> dict[str, tuple[int, ...]]:
        """The codes that add exactly `length` tokens at the cue, with them; no two alike."""
        new = [code for code in codes if (cue, code) not in self._tokens]
        closing = self._closings[cue]
        text = self._closing_text(cue) + cue.gap
        for code, tokens in zip(new, self._tokenizer.control([text + code for code in new]), strict=True):
            added = tuple(tokens[len(closing) :])
            kept = tuple(tokens[: len(closing)]) == closing and self._tokenizer.forbidden.isdisjoint(added)
            self._tokens[cue, code] = added if kept else None
        found: dict[str, tuple[int, ...]] = {}
        seen: set[tuple[int, ...]] = set()
        for code in codes:
            added_tokens = self._tokens[cue, code]
            if added_tokens is not None and len(added_tokens) == length and added_tokens not in seen:
                seen.add(added_tokens)
                found[code] = added_tokens
        return found

    def _closing_text(self, cue: Cue) -> str:
        return self._tokenizer.frame.closing + cue.text
