"""Rows that show images: complete rows by the model's own attention and vision tower, image set by image set.

What the checkpoint's processor made of a set of images is used as it is, and the vision tower sees it once per request.
Rows of different images never share a forward, so nothing that a processor pads an image with depends on company.
"""

from __future__ import annotations

import copy
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
    from numpy.typing import NDArray
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
        self._takes_features = "mm_encoder_outputs" in names and hasattr(model, "get_image_features")
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
        """What the images of a forward's rows come as, each row's in storage of its own, and which tokens are theirs.

        A model that takes the vision tower's output gets it, computed once per request; others get the pixels.
        """
        assert self._images is not None
        arrays = {name: self._tensor(array) for name, array in self._images.arrays.items()}
        inputs: dict[str, Any] = {}
        if self._takes_features:
            if self._images.features is None:
                self._images.features = self._model.get_image_features(**arrays, return_dict=True)
            inputs["mm_encoder_outputs"] = {"image": _repeated(self._images.features, len(ids))}
            del arrays["pixel_values"]
        inputs |= {name: tensor.repeat(len(ids), *[1] * (tensor.dim() - 1)) for name, tensor in arrays.items()}
        if self._types is not None:
            inputs[self._types] = (ids == self._image_token).long()
        return inputs

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array).to(self._device)
        return tensor.to(self._model.dtype) if tensor.is_floating_point() else tensor

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


def _repeated(features: Any, rows: int) -> Any:
    """The vision tower's output for one row as that of several rows that show the same images."""
    repeated = copy.copy(features)
    repeated["pooler_output"] = _times(features.pooler_output, rows)
    if (deep := features.get("deepstack_features")) is not None:  # of several layers, each like the output
        repeated["deepstack_features"] = [_times(layer, rows) for layer in deep]
    return repeated


def _times(value: Any, rows: int) -> Any:
    """A tensor over images, or a list of one tensor for each."""
    return value.repeat(rows, *[1] * (value.dim() - 1)) if isinstance(value, torch.Tensor) else [*value] * rows
