"""The probe at load: does a layout that shares prefixes answer as a plain full forward does?

A made-up prompt, cut into a constant head, a state and two questions of different length, is scored both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sakuradite.engine.backend import Prefix, Read, Row
from sakuradite.engine.torch.backend import LayoutScorer

HEAD, STATE, QUESTIONS = 9, 24, (11, 12)  # tokens; two questions near enough in length to share a batch
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Largest difference of a probability. A missing or misplaced prefix moves probabilities by far more; rounding less."""
PROBED_TOKENS = 512  # vocabulary entries compared


def _prompt(vocabulary: int) -> tuple[tuple[int, ...], list[Row]]:
    draw = np.random.default_rng(0)
    tokens = [int(t) for t in draw.integers(0, vocabulary, HEAD + STATE + sum(QUESTIONS))]
    read = tuple(int(t) for t in draw.permutation(vocabulary)[:PROBED_TOKENS])
    prefix, rest = tuple(tokens[: HEAD + STATE]), tokens[HEAD + STATE :]
    suffixes = (tuple(rest[: QUESTIONS[0]]), tuple(rest[QUESTIONS[0] :]))
    return prefix, [Row(suffix, tuple(Read(i, read) for i in (0, len(suffix) - 1))) for suffix in suffixes]


@torch.inference_mode()
def plain_answers(plain: LayoutScorer, vocabulary: int) -> list[np.ndarray]:
    """Probabilities that the plain layout gives the probe's rows."""
    prefix, rows = _prompt(vocabulary)
    return _probabilities(plain, prefix, rows)


@torch.inference_mode()
def reuse_answers(layout: LayoutScorer, vocabulary: int) -> list[np.ndarray]:
    """Probabilities that a sharing layout gives the probe's rows, all of them continuing one prefix and head."""
    prefix, rows = _prompt(vocabulary)
    layout.set_head(prefix[:HEAD])
    try:
        return _probabilities(layout, prefix, rows)
    finally:
        layout.set_head(())


def _probabilities(layout: LayoutScorer, tokens: tuple[int, ...], rows: Sequence[Row]) -> list[np.ndarray]:
    prefix = Prefix(tokens)
    found = []
    for scores in layout.score([(prefix, row) for row in rows]):
        if isinstance(scores, Exception):
            raise scores
        found += [np.exp(values) for values in scores]
    layout.release(prefix)
    return found


def disagreement(reuse: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> float:
    """The largest difference of a probability."""
    return max(float(np.abs(a - b).max()) for a, b in zip(reuse, plain, strict=True))
