"""Keys and values that rows share: of a request's prefix, or of the constant head of all prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class KeyValues:
    """Per layer keys and values [kv_heads, capacity, d], of which the first `filled` tokens are computed.

    Memory is taken when a layer first writes, in the shape that the model gives.
    """

    def __init__(self, capacity: int, head: KeyValues | None = None) -> None:
        self.capacity = capacity
        self.filled: int = 0 if head is None else head.filled
        self._head = head
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Put the keys and values [kv_heads, n, d] of n tokens in their place."""
        if layer not in self._layers:
            self._layers[layer] = self._allocate(layer, keys, values)
        k, v = self._layers[layer]
        end = position + keys.shape[1]
        k[:, position:end] = keys
        v[:, position:end] = values

    def read(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` keys and values of a layer."""
        if layer not in self._layers and self._head is not None:
            k, v = self._head._layers[layer]
        else:
            k, v = self._layers[layer]
        return k[:, :tokens], v[:, :tokens]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        k = keys.new_empty(keys.shape[0], self.capacity, keys.shape[2])
        v = values.new_empty(values.shape[0], self.capacity, values.shape[2])
        if self._head is not None:  # copied: a few dozen tokens cost less than one more set of keys at every layer
            for new, old in zip((k, v), self._head._layers[layer], strict=True):
                new[:, : self._head.filled] = old[:, : self._head.filled]
        return k, v

    @property
    def bytes(self) -> int:
        """Bytes of memory taken."""
        return sum(k.nbytes + v.nbytes for k, v in self._layers.values())
