"""Rows that show images: complete rows by the model's own attention and vision tower, image set by image set.

What the checkpoint's processor made of a set of images is used as it is, once per row. Rows of different images never
share a forward, so nothing that a processor pads an image with depends on a row's company.
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

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which a forward wants to know which tokens are an image's: 1 there, 0 elsewhere."""


class Illustrated(Padded):
    """The padded layout for rows of one set of images at a time. `native`: the attention that the model came with."""

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
        self._images: Images | None = None

    def score(self, rows: Sequence[tuple[Prefix, Row]]) -> list[RowScores | Exception]:
        """Scores of valid rows, in their order."""
        sets: dict[int, list[int]] = {}
        for i, (prefix, _) in enumerate(rows):
            sets.setdefault(id(prefix.extras["images"]), []).append(i)
        scores: dict[int, RowScores | Exception] = {}
        with self._native_attention():
            for members in sets.values():
                self._images = rows[members[0]][0].extras["images"]
                try:
                    found = super().score([rows[i] for i in members])
                finally:
                    self._images = None
                scores |= dict(zip(members, found, strict=True))
        return [scores[i] for i in range(len(rows))]

    def _inputs(self, ids: Tensor) -> dict[str, Any]:
        """The pixels once per row, in storage of their own, and which tokens are an image's."""
        assert self._images is not None
        inputs: dict[str, Any] = {}
        for name, array in self._images.arrays.items():
            tensor = torch.from_numpy(array).to(self._device)
            if tensor.is_floating_point():
                tensor = tensor.to(self._model.dtype)
            inputs[name] = tensor.repeat(len(ids), *[1] * (tensor.dim() - 1))
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
