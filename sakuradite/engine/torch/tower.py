"""The vision tower: each set of images goes through it once, and what comes out stays with the request.

Sets of one shape share a forward, each with the padding that its own processor gave it: company pads nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sakuradite.engine.backend import Images

if TYPE_CHECKING:
    from torch import Tensor

COMPARED = frozenset({"gemma3", "idefics3", "lfm2_vl", "llava", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm"})
"""Families by `model_type` of which rows with different images share forwards: company was shown to move no answer."""

TOWER_BYTES = 16 << 20  # of the arrays of sets that the tower sees together: 5 tiles of 512 x 512

CHANNELS = 3  # red, green, blue
LIKELY_HIDDEN, LIKELY_HEADS, LIKELY_PATCH = 1280, 16, 14  # where a configuration does not say

type Stack = Tensor | list[Tensor]
"""Something for each image, one after another."""


@dataclass(frozen=True, slots=True)
class Features:
    """What the language model reads of a vision tower's output, by the names of Transformers, which is given it."""

    pooler_output: Stack
    deepstack_features: list[Stack] | None = None
    """The same of several layers."""

    def to_tuple(self) -> tuple[Stack, ...]:
        """Asked for by forwards that give back tuples inside."""
        return (self.pooler_output,)

    def part(self, number: int, parts: int) -> Features:
        """One of equal parts, in storage of its own."""
        if parts == 1:
            return self
        deep = self.deepstack_features
        return Features(
            _part(self.pooler_output, number, parts),
            None if deep is None else [_part(layer, number, parts) for layer in deep],
        )

    @staticmethod
    def joined(some: Sequence[Features]) -> Features:
        """One after another, as for rows that show these images."""
        layers = zip(*(one.deepstack_features or () for one in some), strict=True)
        deep = None if some[0].deepstack_features is None else [_joined(layer) for layer in layers]
        return Features(_joined([one.pooler_output for one in some]), deep)


class Tower:
    """The vision tower of a model, and the way to give it arrays."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        names = inspect.signature(model.forward).parameters
        self.apart = "mm_encoder_outputs" in names and hasattr(model, "get_image_features")
        """Whether it runs apart from the language model, which then takes its output; otherwise they run as one."""
        self.shared = self.apart and model.config.model_type in COMPARED
        """Whether different sets share forwards."""
        self._config = config = model.config.vision_config
        hidden = _size(config, LIKELY_HIDDEN, "hidden_size", "embed_dim")
        intermediate = _size(config, 4 * hidden, "intermediate_size")
        self._patch_bytes = (6 * hidden + 3 * intermediate) * model.dtype.itemsize + 4 * 3 * hidden
        self._heads = _size(config, LIKELY_HEADS, "num_attention_heads", "num_heads")
        side = _size(config, LIKELY_PATCH, "patch_size")
        self._patch_values = side * side * CHANNELS * _size(config, 1, "temporal_patch_size")
        self._layers = 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())

    def look(self, sets: Iterable[Images]) -> None:
        """Look at the sets that were not seen, some of one shape together."""
        for part in self._parts(sets):
            output = self._model.get_image_features(**self.arrays(part, part[0].arrays), return_dict=True)
            found = Features(output.pooler_output, output.get("deepstack_features"))
            for number, images in enumerate(part):
                images.features = found.part(number, len(part))

    def arrays(self, sets: Sequence[Images], names: Iterable[str]) -> dict[str, Tensor]:
        """The arrays of sets of images, one set after another, on the device."""
        found = {}
        for name in names:
            tensor = torch.from_numpy(np.concatenate([images.arrays[name] for images in sets])).to(self._device)
            found[name] = tensor.to(self._model.dtype) if tensor.is_floating_point() else tensor
        return found

    def predicted_bytes(self, sets: Iterable[Images], hidden: int) -> int:
        """An upper bound of what looking at the sets takes: the largest forward, and the features of all of them.

        Per patch what a layer takes per token (`memory.Sizes.forward_bytes`); the arrays as they come and as the model
        wants them; per sequence of patches the mask of its attention where there is one, and its scores where the
        attention keeps them. `hidden` is the width of the language model, which features have.
        """
        value = self._model.dtype.itemsize
        largest = kept = 0
        for part in self._parts(sets):
            given = sum(images.nbytes for images in part)
            patches = sum(images.arrays["pixel_values"].size for images in part) // self._patch_values
            longest = self._sequence(part[0])
            masks = patches * longest * (1 + value) if any(name.endswith("_mask") for name in part[0].arrays) else 0
            if self._config._attn_implementation == "eager":
                masks += 3 * 4 * self._heads * patches * longest
            largest = max(largest, 3 * given + patches * self._patch_bytes + masks)
            kept += patches * hidden * value * self._layers
        return largest + kept

    def _sequence(self, images: Images) -> int:
        """The most patches that attend to one another: those of one image, or of one tile."""
        pixels = images.arrays["pixel_values"]
        if (grid := images.arrays.get("image_grid_thw")) is not None:
            return int(grid.prod(-1).max())
        return max(1, prod(pixels.shape[-3:] if pixels.ndim > 3 else pixels.shape[-2:]) // self._patch_values)

    def _parts(self, sets: Iterable[Images]) -> list[list[Images]]:
        """The sets that were not seen, in parts that go through the tower together."""
        alike: dict[object, list[Images]] = {}
        for images in sets:
            if images.features is None:
                alike.setdefault(tuple((n, a.shape) for n, a in sorted(images.arrays.items())), []).append(images)
        parts = []
        for unseen in alike.values():
            together = max(1, TOWER_BYTES // unseen[0].nbytes) if self.shared else 1
            parts += [unseen[start : start + together] for start in range(0, len(unseen), together)]
        return parts


def _size(config: Any, likely: int, *names: str) -> int:
    """The first of these settings that a configuration has, the side of a square for a pair."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, list | tuple) and value:
            return int(max(value))
    return likely


def _part(stack: Stack, number: int, parts: int) -> Stack:
    size = len(stack) // parts
    own = stack[number * size : (number + 1) * size]
    return own.clone() if isinstance(own, torch.Tensor) else [tensor.clone() for tensor in own]


def _joined(stacks: Sequence[Stack]) -> Stack:
    if tensors := [stack for stack in stacks if isinstance(stack, torch.Tensor)]:
        return torch.cat(tensors)
    return [tensor for stack in stacks for tensor in stack]
