"""Rows that show images: complete rows by the model's own attention, each behind what the tower made of its images.

Rows of different images share a forward of the language model where that was shown to move no answer; in other
families each set of images has its own. Prefixes with images are never shared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sakuradite.engine.backend import Images, Prefix, Row, RowScores
from sakuradite.engine.torch.forward import Caller
from sakuradite.engine.torch.layers import IMPLEMENTATION
from sakuradite.engine.torch.padded import Padded
from sakuradite.engine.torch.rotary import Rotary
from sakuradite.engine.torch.tower import Features, Tower

if TYPE_CHECKING:
    from torch import Tensor

MASKING = "token_type_ids"
TOKEN_TYPES = ("mm_token_type_ids", MASKING)
"""Names under which a forward wants to know which tokens are an image's: 1 there, 0 elsewhere."""


class Illustrated(Padded):
    """The padded layout for rows with images. `native`: the attention that the model came with."""

    def __init__(
        self,
        model: Any,
        rotary: Rotary,
        device: torch.device,
        pad: int,
        *,
        native: str,
        pass_tokens: int,
        pass_reads: int,
    ) -> None:
        super().__init__(Caller(model), rotary, device, pad, pass_tokens=pass_tokens, pass_reads=pass_reads)
        self._model, self._native = model, native
        self._image_token = int(model.config.image_token_id)
        names = inspect.signature(model.forward).parameters
        self._types = next((name for name in TOKEN_TYPES if name in names), None)
        self._tower = Tower(model, device)
        alone = f"different images never share a batch: {model.config.model_type} is not among the families compared"
        self.warnings = () if self._tower.shared else (alone,)

    def score(self, rows: Sequence[tuple[Prefix, Row]]) -> list[RowScores | Exception]:
        """Scores of valid rows, in their order."""
        sets: dict[int, list[int]] = {}
        for i, (prefix, _) in enumerate(rows):
            sets.setdefault(id(prefix.extras["images"]), []).append(i)
        scores: dict[int, RowScores | Exception] = {}
        with self._native_attention():
            if self._tower.apart:
                self._tower.look(_shown(rows))
            for members in [range(len(rows))] if self._tower.shared else sets.values():
                scores |= dict(zip(members, super().score([rows[i] for i in members]), strict=True))
        return [scores[i] for i in range(len(rows))]

    def extra_bytes(self, rows: Sequence[tuple[Prefix, Row]]) -> int:
        """An upper bound of what the images of these rows take besides what rows of text do.

        That is the tower, and masks over pairs of tokens where the language model is told which ones are images, as
        Gemma 3 is: two of them, as they are and in the model's dtype.
        """
        shown = _shown(rows)
        hidden = self._model.config.get_text_config().hidden_size
        found = self._tower.predicted_bytes(shown, hidden)
        if shown and self._types == MASKING:
            longest = max(len(row.suffix) for prefix, row in rows if "images" in prefix.extras)
            found += 2 * max(longest, self._pass_tokens) * longest * (1 + self._model.dtype.itemsize)
        return found

    def _inputs(self, ids: Tensor, rows: Sequence[tuple[Prefix, Row]]) -> dict[str, Any]:
        """What the images of a forward's rows come as, one row's after another's, and which tokens are theirs.

        A model that takes its tower's output gets it, and of the arrays those that tell places; others get the pixels.
        """
        shown: list[Images] = [prefix.extras["images"] for prefix, _ in rows]
        inputs: dict[str, Any] = {}
        names = set(shown[0].arrays)
        if self._tower.apart:
            inputs["mm_encoder_outputs"] = {"image": Features.joined([images.features for images in shown])}
            names = {name for name in names if not name.startswith("pixel_")}
        inputs |= self._tower.arrays(shown, names)
        if self._types is not None:
            inputs[self._types] = (ids == self._image_token).long()
        return inputs

    @contextmanager
    def _native_attention(self) -> Iterator[None]:
        """The model's own attention for the duration, where packed forwards have replaced it."""
        text = self._model.config.get_text_config()
        if text._attn_implementation != IMPLEMENTATION:
            yield
            return
        set_attention(self._model, self._native)
        try:
            yield
        finally:
            set_attention(self._model, IMPLEMENTATION)


def set_attention(model: Any, implementation: str) -> None:
    """Give the layers of the language model their attention; a vision tower keeps its own."""
    if names := [n for n in model.config.sub_configs if getattr(model.config, n) is model.config.get_text_config()]:
        model.set_attn_implementation({names[0]: implementation})
    else:
        model.set_attn_implementation(implementation)


def _shown(rows: Sequence[tuple[Prefix, Row]]) -> list[Images]:
    """The sets of images that rows show, each once."""
    return list({id(images): images for prefix, _ in rows if (images := prefix.extras.get("images"))}.values())
