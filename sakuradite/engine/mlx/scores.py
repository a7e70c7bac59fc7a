"""What both MLX backends do with rows: find the ones that cannot be scored, and read label log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from sakuradite.engine.backend import Prefix, Row, RowScores
from sakuradite.errors import APIError, ContextExceededError, InferenceFailedError


def fault(prefix: Prefix, row: Row, vocabulary: int, context: int) -> APIError | None:
    """What is wrong with a row. MLX reads past the end of a table without a word."""
    total = len(prefix.tokens) + len(row.suffix)
    if total > context:
        return ContextExceededError(f"a prompt of {total} tokens is over the model's context of {context}")
    largest = max(*prefix.tokens, *row.suffix, *(t for read in row.reads for t in read.tokens), 0)
    if largest >= vocabulary:
        return InferenceFailedError(f"token {largest} is outside the model's vocabulary of {vocabulary}")
    return None


def read(logits: Any, rows: Sequence[Row]) -> list[RowScores]:
    """Log-softmax over the vocabulary at the tokens of each read. logits: [reads of all rows, vocabulary]."""
    wanted = [one.tokens for row in rows for one in row.reads]
    logits = logits.astype(mx.float32)
    line = mx.array([n for n, tokens in enumerate(wanted) for _ in tokens])
    token = mx.array([t for tokens in wanted for t in tokens])
    logs = np.array(logits[line, token] - mx.logsumexp(logits, axis=-1)[line], dtype=np.float32)
    pieces = iter(np.split(logs, np.cumsum([len(tokens) for tokens in wanted])[:-1]))
    return [tuple(next(pieces) for _ in row.reads) for row in rows]
