"""Text on MLX: rows of tokens to label log-probabilities, through mlx-lm's models and their native caches.

Three paths, decided when the model is loaded (R11.9):
- float32 weights and attention in every layer: rows in right-padded batches, prefixes computed once and forked;
- packed or 16-bit weights: each row complete and alone, in one forward when it is short;
- recurrent or rotating caches: the same, because their state can neither be padded nor is it forked here.

Inputs of more than `PREFILL_STEP` tokens fill the native cache step by step, so no forward is larger than that. The
vocabulary head runs at the positions that are read only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from sakuradite.engine.backend import Group, ModelFacts, OutOfDeviceMemory, Prefix, Row, RowScores
from sakuradite.engine.mlx import runtime
from sakuradite.engine.mlx.body import Body
from sakuradite.engine.mlx.loading import Loaded
from sakuradite.engine.mlx.scores import fault, read
from sakuradite.errors import ModelLoadFailedError

PREFILL_STEP = 2048  # mlx-lm's own step; a longer forward needs more memory and is no faster
MIN_SHARED_PREFIX_TOKENS = 128  # below this a forward for the prefix alone costs more than it saves
PROBE_TOKENS = 8


@dataclass(slots=True)
class Kept:
    """What a prefix holds between batches of its request: native caches of one row, and what they count for."""

    caches: list[Any]
    tokens: int


class TextBackend:
    """A text model on MLX. `cache_bytes` is what prefixes may hold between batches."""

    def __init__(self, loaded: Loaded, cache_bytes: int, max_input_tokens: int) -> None:
        self._model = loaded.model
        self._cache_module = runtime.library("mlx_lm.models.cache")
        translation = loaded.translation
        gain = 1.0
        if translation.family.exact_embedding_scale and loaded.dtype == "float32" and not loaded.packed:
            root = translation.settings["hidden_size"] ** 0.5
            gain = root / mx.array(root, mx.bfloat16).item()
        self._body = Body(self._model, gain)
        self._head: tuple[int, ...] = ()
        self._head_caches: list[Any] | None = None
        self._kept_tokens = 0
        self._vocabulary, self._token_bytes, forkable = self._probe()
        self._context = translation.context_length or max_input_tokens
        self._cache_tokens = cache_bytes // self._token_bytes if self._token_bytes else 0
        self._forks = forkable and loaded.dtype == "float32" and not loaded.packed
        self.facts = ModelFacts(
            architecture=translation.model_type,
            device=loaded.device,
            dtype=loaded.dtype,
            context_length=self._context,
            vocabulary_size=self._vocabulary,
            parameters=loaded.parameters,
            weight_bytes=loaded.weight_bytes,
            layout="cloned" if self._forks else "padded",
            layout_reason=self._reason(loaded, forkable),
            warnings=translation.warnings,
        )

    @staticmethod
    def _reason(loaded: Loaded, forkable: bool) -> str:
        if not forkable:
            return "its recurrent or rotating caches keep their native path, one row at a time"
        if loaded.packed:
            return "packed weights keep the plain path, one row at a time"
        if loaded.dtype != "float32":
            return f"{loaded.dtype} weights keep the plain path, one row at a time"
        return "attention in every layer, in float32"

    def _probe(self) -> tuple[int, int, bool]:
        """The vocabulary's size, bytes of cache per token, and whether all caches are plain keys and values.

        Proves on the way that the head gives the same at one position as at all. Raises ModelLoadFailedError.
        """
        tokens = mx.arange(PROBE_TOKENS)[None] + 1
        everywhere = self._model(tokens)[:, -1].astype(mx.float32)
        self._body.positions = (mx.array([0]), mx.array([PROBE_TOKENS - 1]))
        try:
            there = self._model(tokens)[0].astype(mx.float32)
        finally:
            self._body.positions = None
        if there.shape != everywhere.shape or not mx.allclose(there, everywhere, rtol=1e-2, atol=1e-2).item():
            raise ModelLoadFailedError("the vocabulary head does not work at single positions on this model")
        caches = self._new_caches()
        forkable = all(type(cache) is self._cache_module.KVCache for cache in caches)
        if not forkable:
            return int(there.shape[-1]), 0, False
        self._body(tokens, cache=caches)
        per_token = sum(
            array.shape[1] * array.shape[3] * array.itemsize for cache in caches for array in (cache.keys, cache.values)
        )
        return int(there.shape[-1]), per_token, True

    def set_head(self, tokens: Sequence[int]) -> None:
        """Name the constant head; its keys and values are computed when a prefix first needs them."""
        self._head, self._head_caches = tuple(tokens), None

    def score(self, groups: Sequence[Group]) -> list[list[RowScores | Exception]]:
        """Scores of every row. Raises OutOfDeviceMemory; other failures as MLX raises them."""
        scores: list[list[RowScores | Exception]] = [
            [fault(group.prefix, row, self._vocabulary, self._context) or () for row in group.rows] for group in groups
        ]
        whole: list[tuple[int, int]] = []
        try:
            for i, group in enumerate(groups):
                good = [j for j, found in enumerate(scores[i]) if not isinstance(found, Exception)]
                if good and self._reuses(group.prefix):
                    behind = self._continue(group.prefix, [group.rows[j] for j in good])
                    for j, row_scores in zip(good, behind, strict=True):
                        scores[i][j] = row_scores
                else:
                    whole += [(i, j) for j in good]
            for (i, j), row_scores in zip(whole, self._complete(groups, whole), strict=True):
                scores[i][j] = row_scores
        except RuntimeError as error:
            if runtime.is_out_of_memory(error):
                mx.clear_cache()
                raise OutOfDeviceMemory(str(error)) from error
            raise
        return scores

    def release(self, prefix: Prefix) -> None:
        """Free a prefix's keys and values."""
        if isinstance(prefix.cache, Kept):
            self._kept_tokens -= prefix.cache.tokens
            prefix.cache = None
            mx.clear_cache()

    def close(self) -> None:
        """Free the weights and MLX's pool of freed buffers."""
        self._head_caches = None
        del self._model, self._body
        mx.clear_cache()

    def _reuses(self, prefix: Prefix) -> bool:
        """Whether a prefix is computed once and forked: by its own length and the room for caches alone."""
        if not self._forks or len(prefix.tokens) < MIN_SHARED_PREFIX_TOKENS:
            return False
        return prefix.cache is not None or self._kept_tokens + len(prefix.tokens) <= self._cache_tokens

    # Rows behind a prefix.

    def _continue(self, prefix: Prefix, rows: Sequence[Row]) -> list[RowScores]:
        if prefix.cache is None:
            prefix.cache = Kept(self._prefix_caches(prefix.tokens), len(prefix.tokens))
            self._kept_tokens += len(prefix.tokens)
        kept: Kept = prefix.cache
        longest = max(len(row.suffix) for row in rows)
        together = max(1, self._cache_tokens // (kept.tokens + longest))  # a fork holds the prefix once per row
        scores: list[RowScores] = []
        for start in range(0, len(rows), together):
            part = rows[start : start + together]
            caches = self._fork(kept.caches, len(part))
            scores += self._forward([row.suffix for row in part], part, [0] * len(part), caches)
        return scores

    def _prefix_caches(self, tokens: tuple[int, ...]) -> list[Any]:
        head = self._head
        if head and len(head) < len(tokens) and tokens[: len(head)] == head:
            if self._head_caches is None:
                self._head_caches = self._prefill(self._new_caches(), head)
            return self._prefill(self._fork(self._head_caches, 1), tokens[len(head) :])
        return self._prefill(self._new_caches(), tokens)

    def _fork(self, caches: Sequence[Any], rows: int) -> list[Any]:
        """Copies of one row's caches for several rows; what is written into them does not reach the original."""
        forks = []
        for cache in caches:
            keys, values = cache.keys[:, :, : cache.offset], cache.values[:, :, : cache.offset]
            fork = self._cache_module.KVCache()
            # No room is left behind the keys, so the first update moves them into arrays of the fork's own.
            fork.keys = mx.broadcast_to(keys, (rows, *keys.shape[1:]))
            fork.values = mx.broadcast_to(values, (rows, *values.shape[1:]))
            fork.offset = cache.offset
            forks.append(fork)
        return forks

    # Complete rows.

    def _complete(self, groups: Sequence[Group], which: Sequence[tuple[int, int]]) -> list[RowScores]:
        """Rows with their prefix in front: in one padded batch in float32, else one by one."""
        texts = [groups[i].prefix.tokens + groups[i].rows[j].suffix for i, j in which]
        rows = [groups[i].rows[j] for i, j in which]
        starts = [len(groups[i].prefix.tokens) for i, _ in which]
        alone = [n for n, text in enumerate(texts) if not self._forks or len(text) > PREFILL_STEP]
        batch = [n for n in range(len(texts)) if n not in set(alone)]
        scores: list[RowScores] = [()] * len(texts)
        for part in ([batch] if batch else []) + [[n] for n in alone]:
            found = self._whole([texts[n] for n in part], [rows[n] for n in part], [starts[n] for n in part])
            for n, row_scores in zip(part, found, strict=True):
                scores[n] = row_scores
        return scores

    def _whole(self, texts: Sequence[tuple[int, ...]], rows: Sequence[Row], starts: Sequence[int]) -> list[RowScores]:
        """Complete rows in one forward; a single long one through its native cache, up to the first position read."""
        if len(texts) > 1 or len(texts[0]) <= PREFILL_STEP:
            return self._forward(texts, rows, starts, None)
        text, row, start = texts[0], rows[0], starts[0]
        cut = start + min(one.offset for one in row.reads)
        caches = self._prefill(self._new_caches(), text[:cut])
        return self._forward([text[cut:]], [row], [start - cut], caches)

    def _new_caches(self) -> list[Any]:
        return list(self._cache_module.make_prompt_cache(self._model))

    def _prefill(self, caches: list[Any], tokens: Sequence[int]) -> list[Any]:
        """Run tokens through the layers into the caches, in steps. The head is not computed."""
        for start in range(0, len(tokens), PREFILL_STEP):
            self._body(mx.array([tokens[start : start + PREFILL_STEP]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            if len(tokens) > PREFILL_STEP:
                mx.clear_cache()
        return caches

    def _forward(
        self, texts: Sequence[Sequence[int]], rows: Sequence[Row], starts: Sequence[int], caches: list[Any] | None
    ) -> list[RowScores]:
        """One right-padded forward; padding is behind every read. `starts`: where a row's suffix begins in its text."""
        longest = max(map(len, texts))
        inputs = mx.array([[*text, *[0] * (longest - len(text))] for text in texts])
        reads = [(n, starts[n] + one.offset) for n, row in enumerate(rows) for one in row.reads]
        self._body.positions = (mx.array([n for n, _ in reads]), mx.array([offset for _, offset in reads]))
        try:
            logits = self._model(inputs) if caches is None else self._model(inputs, cache=caches)
        finally:
            self._body.positions = None
        return read(logits[0], rows)
