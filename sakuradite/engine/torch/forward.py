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


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Integers as a tensor on the device; to a GPU from pinned memory, without waiting."""
    tensor = torch.tensor(values, dtype=dtype)
    return _pinned(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in memory that a GPU reads while the host goes on."""
    return tensor.pin_memory()


def _wait(device: torch.device) -> None:
    """Return when a GPU has done what it was set to do."""
    torch.cuda.current_stream(device).synchronize()


type Found = np.ndarray[Any, np.dtype[np.float32]] | APIError


class Reading:
    """Log-probabilities at the wanted positions of logits [positions, vocabulary]: set going now, fetched later.

    log-softmax in float32 over the whole vocabulary, then the wanted entries: only those leave the device. Nothing
    waits for the device before `fetch`, so further forwards can be set going meanwhile.
    """

    def __init__(self, logits: Tensor, wanted: Sequence[Wanted]) -> None:
        self._counts = [len(tokens) for _, tokens in wanted]
        width = max(self._counts, default=0)
        position = to_device([p for p, _ in wanted], logits.device)
        token = to_device([[*tokens, *tokens[:1] * (width - len(tokens))] for _, tokens in wanted], logits.device)
        logits = logits.float()
        self._scores = logits[position[:, None], token] - logits.logsumexp(-1)[position, None] if wanted else None

    @staticmethod
    def fetch(readings: Sequence[Reading]) -> list[list[Found]]:
        """Per reading one array per wanted position, or an error where they are no numbers. Waits once for all."""
        scores = [reading._scores for reading in readings]
        started = [None if s is None else s.to("cpu", non_blocking=s.device.type == "cuda") for s in scores]
        for device in {s.device for s in scores if s is not None and s.device.type == "cuda"}:
            _wait(device)
        return [
            [] if values is None else reading._told(values) for reading, values in zip(readings, started, strict=True)
        ]

    def _told(self, fetched: Tensor) -> list[Found]:
        values: np.ndarray[Any, np.dtype[np.float32]] = fetched.numpy()
        broken = np.isnan(values).any(axis=1)
        return [
            InferenceFailedError("the model's output for this question is not a number")
            if broken[i]
            else values[i, :count]
            for i, count in enumerate(self._counts)
        ]


def joined(found: Iterable[Found]) -> RowScores | Exception:
    """A row's scores from those of its reads, or the first error among them."""
    scores: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for values in found:
        if isinstance(values, APIError):
            return values
        scores.append(values)
    return tuple(scores)


def scattered(
    batches: Sequence[Sequence[int]], rows: Sequence[Row], readings: Sequence[Reading]
) -> list[RowScores | Exception]:
    """The scores of all rows in their order, from one reading per batch of their indices."""
    scores: dict[int, RowScores | Exception] = {}
    for batch, values in zip(batches, Reading.fetch(readings), strict=True):
        found = iter(values)
        scores |= {i: joined([next(found) for _ in rows[i].reads]) for i in batch}
    return [scores[i] for i in range(len(rows))]


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
