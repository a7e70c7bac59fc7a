"""A model's layers apart from its vocabulary head, so that the head runs at the positions that are read and no other.

mlx-lm's models call their inner model and then their own head, scaling and soft-capping. `Body` stands in for the inner
model: it passes everything on and, while positions are set, hands the head those positions alone.
"""

from __future__ import annotations

from typing import Any

from sakuradite.errors import ModelLoadFailedError

INNER_NAMES = ("model", "backbone", "norm")  # what stands right before the head; Idefics3 keeps no layers apart


def stand_in(owner: Any, name: str, replacement: Any) -> None:
    """Have `owner` call `replacement` in place of its part `name`.

    An mlx Module is a dict of its parts; an attribute of the instance is found first, and the part stays in the dict,
    where parameters are looked up.
    """
    object.__setattr__(owner, name, replacement)


class Body:
    """The inner model of `model`, put in its place. `positions`: rows and offsets to read, or None for all."""

    def __init__(self, model: Any, embedding_gain: float = 1.0) -> None:
        self.positions: tuple[Any, Any] | None = None
        self._gain = embedding_gain
        owner = getattr(model, "language_model", model)
        name = next((n for n in INNER_NAMES if n in owner), None)
        if name is None:
            raise ModelLoadFailedError(f"{type(model).__module__} keeps its layers under a name that is not known")
        self.inner = owner[name]
        stand_in(owner, name, self)

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._gain != 1.0:
            args, kwargs["input_embeddings"] = args[:1], self.inner.embed_tokens(inputs) * self._gain
        hidden = self.inner(inputs, *args, **kwargs)
        if self.positions is None:
            return hidden
        rows, offsets = self.positions
        return hidden[rows, offsets][None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
