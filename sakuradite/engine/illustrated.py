"""From a request with images to rows of tokens: complete rows, since image prefixes are never shared.

The caller's text stays text, as everywhere: the processor sees the images alone, and what they expand to is put where
the chat template shows them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from sakuradite.engine.backend import Read, Row
from sakuradite.engine.labels import Labels
from sakuradite.engine.pictures import Pictures, Prepared, decode, expanded
from sakuradite.engine.prompt import WORDING, Wording, question_text
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.errors import UnsupportedModelError
from sakuradite.records import Candidate, Prose, QuestionRecord, RequestRecord

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(slots=True, eq=False)
class Album:
    """The images of one request, decoded, and what was made of them for the questions so far."""

    decoded: Sequence[Image]
    prepared: dict[tuple[int, ...], Prepared] = field(default_factory=dict)
    """By the images that a question shows, in order."""
    tokens: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Of a text, by how it was tokenised."""


class Illustrator:
    """Compiles questions that show images, for one model."""

    def __init__(self, tokenizer: FastTokenizer, pictures: Pictures, wording: Wording = WORDING) -> None:
        self._tokenizer, self._pictures, self._wording = tokenizer, pictures, wording

    def album(self, request: RequestRecord) -> Album:
        """The request's images, each decoded once. Raises ValidationError naming the one that cannot be."""
        return Album([decode(data, i) for i, data in enumerate(request.images)])

    def turn(self, state: Prose, question: QuestionRecord, labels: Labels) -> Prose:
        """What the user's turn holds besides the head: the state, then the question, images in their places."""
        mark = f"\ue000{secrets.token_hex(8)}:"  # stands in for an image; no text of the caller can hold it
        marked = replace(
            question,
            instructions=_marked(question.instructions, mark),
            candidates=tuple(Candidate(c.name, _marked(c.description, mark)) for c in question.candidates),
        )
        first, *others = question_text(marked, labels.codes, self._wording).split(mark)
        asked: list[str | int] = [first]
        for other in others:
            index, _, text = other.partition(":")
            asked += (int(index), text)
        shown: list[str | int] = []
        for part in state:
            if shown and isinstance(part, str) and isinstance(shown[-1], str):
                shown[-1] += part
            else:
                shown.append(part)
        return tuple(part for part in (*shown, *asked) if part != "")

    def prompt(self, turn: Prose, album: Album) -> tuple[tuple[int, ...], Prepared]:
        """The tokens of a prompt up to the end of the user's turn, and the images that it shows.

        Raises ValidationError for images that the processor does not take, UnsupportedModelError where the template
        cannot show them.
        """
        shown = tuple(part for part in turn if isinstance(part, int))
        if shown not in album.prepared:
            album.prepared[shown] = self._pictures.prepare(shown, album.decoded)
        prepared = album.prepared[shown]
        runs, parts = _runs(turn)
        frame = self._tokenizer.turn(parts, self._pictures.placeholder)
        if not self._tokenizer.frame.closing.startswith(frame[-1]):
            raise UnsupportedModelError("the chat template ends a turn with images in another way than one without")
        opening, *between = expanded(frame[:-1], self._pictures.placeholder, prepared.expansions)
        tokens = list(self._tokens(album, "opening", opening + self._wording.image_head))
        for number, run in enumerate(runs):
            if number:
                tokens += self._tokens(album, "control", between[number - 1])
            for text in run:
                tokens += self._tokens(album, "plain", text)
        return tuple(tokens), prepared

    def rows(self, tokens: tuple[int, ...], labels: Labels) -> tuple[Row, ...]:
        """Complete rows: one, or one for each first token of labels that have two."""
        end = len(tokens) - 1
        if len(labels.paths[0]) == 1:
            return (Row(tokens, (Read(end, labels.firsts),)),)
        rows = []
        for branch, first in enumerate(labels.firsts):
            seconds = Read(end + 1, tuple(path[1] for path in labels.paths if path[0] == first))
            rows.append(Row((*tokens, first), (seconds,) if branch else (Read(end, labels.firsts), seconds)))
        return tuple(rows)

    def _tokens(self, album: Album, how: Literal["opening", "control", "plain"], text: str) -> Sequence[int]:
        """The tokens of a text by the method of the tokenizer, each text of a request once."""
        if (how, text) not in album.tokens:
            album.tokens[how, text] = (
                self._tokenizer.opening(text) if how == "opening" else getattr(self._tokenizer, how)([text])[0]
            )
        return album.tokens[how, text]


def _marked(prose: Prose | None, mark: str) -> Prose | None:
    """Prose without images: a mark with the image's index in place of each."""
    if prose is None:
        return None
    return ("".join(part if isinstance(part, str) else f"{mark}{part}:" for part in prose),)


def _runs(turn: Prose) -> tuple[list[list[str]], tuple[bool, ...]]:
    """The runs of texts in a turn, and its parts for the template: True a run of texts, False an image.

    The head begins the first run, which stands after the images that the state begins with.
    """
    leading = next((i for i, part in enumerate(turn) if isinstance(part, str)), len(turn))
    runs: list[list[str]] = [[]]
    parts = [*[False] * leading, True]
    for part in turn[leading:]:
        if isinstance(part, int):
            parts.append(False)
        elif parts[-1]:
            runs[-1].append(part)
        else:
            parts.append(True)
            runs.append([part])
    return runs, tuple(parts)
