"""The PyTorch backend: a loaded model behind the engine's seam, with one layout chosen for it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sakuradite.engine.backend import Group, ModelFacts, OutOfDeviceMemory, Prefix, Row, RowScores
from sakuradite.engine.torch import memory
from sakuradite.engine.torch.forward import fault
from sakuradite.engine.torch.memory import Budget


class LayoutScorer(Protocol):
    """What the three layouts have in common."""

    def set_head(self, tokens: Sequence[int]) -> None: ...

    def score(self, rows: Sequence[tuple[Prefix, Row]]) -> list[RowScores | Exception]: ...

    def release(self, prefix: Prefix) -> None: ...


class IllustratedScorer(LayoutScorer, Protocol):
    """What the layout of rows with images has besides."""

    def extra_bytes(self, rows: Sequence[tuple[Prefix, Row]]) -> int: ...


class TorchBackend:
    """A `Backend`. Rows that cannot run fail alone; running out of memory raises OutOfDeviceMemory."""

    def __init__(
        self,
        model: Any,
        facts: ModelFacts,
        layout: LayoutScorer,
        budget: Budget,
        illustrated: IllustratedScorer | None = None,
    ) -> None:
        self.facts = facts
        self._model = model
        self._layout = layout
        self._budget = budget
        self._illustrated = illustrated
        self._head_tokens = 0

    def set_head(self, tokens: Sequence[int]) -> None:
        """Name the constant head that every prefix starts with."""
        self._head_tokens = len(tokens)
        self._layout.set_head(tokens)

    @torch.inference_mode()
    def score(self, groups: Sequence[Group]) -> list[list[RowScores | Exception]]:
        """Scores per group and row; see `Backend.score`."""
        scores: list[list[RowScores | Exception]] = []
        rows: list[tuple[Prefix, Row]] = []
        places: list[tuple[int, int]] = []
        for g, group in enumerate(groups):
            broken = _prefix_fault(group.prefix, self.facts.vocabulary_size)
            scores.append([])
            for r, row in enumerate(group.rows):
                error = broken or fault(row, group.prefix.tokens, self.facts.vocabulary_size, self.facts.context_length)
                scores[g].append(error or ())
                if error is None:
                    rows.append((group.prefix, row))
                    places.append((g, r))
        for layout, members in self._by_layout(rows):
            for i, found in zip(members, self._score(layout, [rows[i] for i in members]), strict=True):
                g, r = places[i]
                scores[g][r] = found
        return scores

    def _by_layout(self, rows: Sequence[tuple[Prefix, Row]]) -> list[tuple[LayoutScorer, list[int]]]:
        """The rows of text and those that show images, as indices, each with the layout that scores them."""
        pictured = [i for i, (prefix, _) in enumerate(rows) if "images" in prefix.extras]
        plain = [i for i, (prefix, _) in enumerate(rows) if "images" not in prefix.extras]
        found = [(self._layout, plain)] if plain else []
        if pictured:
            assert self._illustrated is not None  # the engine refuses images before
            found.append((self._illustrated, pictured))
        return found

    def predicted_bytes(self, rows: Sequence[tuple[Prefix, Row]]) -> int:
        """An upper bound of what scoring these rows takes beside the weights: one forward and the prefixes' stores."""
        extra = 0 if self._illustrated is None else self._illustrated.extra_bytes(rows)
        return self._budget.predict(rows, self.facts.layout, self._head_tokens) + extra

    def _score(self, layout: LayoutScorer, rows: Sequence[tuple[Prefix, Row]]) -> list[RowScores | Exception]:
        needed, device = self.predicted_bytes(rows), torch.device(self.facts.device)
        free = memory.free_bytes(device)
        if needed > free and device.type == "cpu":
            memory.trim_heap()  # what earlier batches left in it counts as taken
            free = memory.free_bytes(device)
        if needed > free:  # Linux would hand it out and kill the process later
            raise OutOfDeviceMemory(f"a batch needs up to {needed} bytes and {free} are free")
        try:
            return layout.score(rows)
        except (torch.OutOfMemoryError, MemoryError) as error:
            failure = str(error)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            failure = str(error)
        # here, outside the handlers, the failed forward's frames and their tensors are gone
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfDeviceMemory(failure)

    def release(self, prefix: Prefix) -> None:
        """Free what is kept for a prefix."""
        self._layout.release(prefix)
        prefix.extras.clear()

    def close(self) -> None:
        """Free the weights."""
        self._model = self._layout = self._illustrated = None  # type: ignore[assignment]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _prefix_fault(prefix: Prefix, vocabulary: int) -> Exception | None:
    from sakuradite.errors import InferenceFailedError

    if prefix.tokens and (min(prefix.tokens) < 0 or max(prefix.tokens) >= vocabulary):
        return InferenceFailedError(f"a token is outside the model's vocabulary of {vocabulary}")
    return None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """torch's CPU allocator, and MPS, raise a plain RuntimeError."""
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text or "out of memory" in text
