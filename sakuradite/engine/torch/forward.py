"""One call of the model: the arguments its forward knows, log-probabilities from its logits, rows that cannot run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sakuradite.engine.backend import Row, RowScores
from sakuradite.errors import APIError, ContextExceededError, InferenceFailedError

if TYPE_CHECKING:
    from torch import Tensor

type Wanted = tuple[int, tuple[int, ...]]
"""An index into the positions that a forward kept, and the vocabulary entries to read there."""


class Caller:
    """Calls a Transformers model by the names its `forward` has: some came late, `past_key_values` goes in 5.40."""

    def __init__(self, model: Any) -> None:
        self.model = model
        names = inspect.signature(model.forward).parameters
        self._keeps = "logits_to_keep" in names
        self._positions = "position_ids" in names
        self.cache_name = next(name for name in ("cache", "past_key_values", "cache_params") if name in names)

    def logits(self, ids: Tensor, keep: Tensor, positions: Tensor | None = None, **inputs: Any) -> Tensor:
        """Logits [batch, len(keep), vocabulary] at the positions `keep` of every row."""
        if self._positions and positions is not None:
            inputs["position_ids"] = positions
        if self._keeps:
            return self.model(input_ids=ids, logits_to_keep=keep, **inputs).logits  # type: ignore[no-any-return]
        return self.model(input_ids=ids, **inputs).logits[:, keep]  # type: ignore[no-any-return]


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Integers as a tensor on the device; to a GPU from pinned memory, without waiting."""
    tensor = torch.tensor(values, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def read(logits: Tensor, wanted: Sequence[Wanted]) -> list[np.ndarray[Any, np.dtype[np.float32]] | APIError]:
    """Log-probabilities at the wanted positions of logits [positions, vocabulary]; an error where they are no numbers.

    log-softmax in float32 over the whole vocabulary, then the wanted entries: only those leave the device.
    """
    if not wanted:
        return []
    width = max(len(tokens) for _, tokens in wanted)
    position = to_device([p for p, _ in wanted], logits.device)
    token = to_device([[*tokens, *tokens[:1] * (width - len(tokens))] for _, tokens in wanted], logits.device)
    logits = logits.float()
    scores = logits[position[:, None], token] - logits.logsumexp(-1)[position, None]
    values: np.ndarray[Any, np.dtype[np.float32]] = scores.cpu().numpy()  # the one synchronisation of a forward
    broken = np.isnan(values).any(axis=1)
    return [
        InferenceFailedError("the model's output for this question is not a number")
        if broken[i]
        else values[i, : len(tokens)]
        for i, (_, tokens) in enumerate(wanted)
    ]


def joined(found: Iterable[np.ndarray[Any, np.dtype[np.float32]] | APIError]) -> RowScores | Exception:
    """A row's scores from those of its reads, or the first error among them."""
    scores: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for values in found:
        if isinstance(values, APIError):
            return values
        scores.append(values)
    return tuple(scores)


def fault(row: Row, prefix: Sequence[int], vocabulary: int, context: int) -> APIError | None:
    """What would make this row fail the forward of its whole batch. Found before, it fails alone."""
    total = len(prefix) + len(row.suffix)
    if total > context:
        return ContextExceededError(f"a prompt of {total} tokens is over the model's context of {context}")
    if not row.suffix or not row.reads:
        return InferenceFailedError("a row needs a token after the prefix and a position to read")
    if not all(0 <= r.offset < len(row.suffix) and r.tokens for r in row.reads):
        return InferenceFailedError("a read lies outside its row, or reads no token")
    tokens = (*row.suffix, *(token for r in row.reads for token in r.tokens))
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        return InferenceFailedError(f"a token is outside the model's vocabulary of {vocabulary}")
    return None
