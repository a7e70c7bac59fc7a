"""Prompts for parity tests, and the plain full forward that every layout has to agree with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Group, Prefix, Read, Row
from sakuradite.engine.torch.assembly import assemble
from sakuradite.engine.torch.backend import TorchBackend

LABELS = tuple(range(28, 40))  # vocabulary entries compared; in SmolLM2 they hold the digits


def loaded(checkpoint: Path, dtype: str = "float32", **settings: Any) -> TorchBackend:
    """A backend on one CPU thread, unless told otherwise: tiny tensors gain nothing from two."""
    settings = {"num_cpus": 1, **settings}
    return assemble(ModelConfig(model=checkpoint.name, device="cpu", dtype=dtype, **settings), checkpoint)


def tokens(seed: int, count: int, vocabulary: int = 256) -> tuple[int, ...]:
    """Random ordinary tokens, the same for the same seed."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(6, vocabulary, count))


def row(seed: int, count: int) -> Row:
    """A question read at its last token."""
    return Row(tokens(seed, count), (Read(count - 1, LABELS),))


def group(seed: int, state: int, questions: tuple[int, ...], head: tuple[int, ...] = ()) -> Group:
    """A request: a state of so many tokens behind a head, and questions of the given lengths."""
    rows = [row(1000 * seed + i, n) for i, n in enumerate(questions)]
    return Group(Prefix((*head, *tokens(seed, state))), rows)


def probabilities(backend: TorchBackend, *groups: Group) -> list[NDArray[np.float64]]:
    """Per group, probabilities [rows, labels] of the first read; a failed row fails the test."""
    result = []
    for scores in backend.score(groups):
        values = []
        for found in scores:
            assert not isinstance(found, Exception), found
            values.append(np.exp(found[0].astype(np.float64)))
        result.append(np.array(values))
    return result


@cache
def _native(checkpoint: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def plain(checkpoint: Path, dtype: str, asked: Group) -> NDArray[np.float64]:
    """What Transformers itself answers to each complete row, one full forward per row, fresh rotary state each."""
    model = _native(checkpoint, dtype)
    values = []
    for asked_row in asked.rows:
        ids = torch.tensor([[*asked.prefix.tokens, *asked_row.suffix]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(asked.prefix.tokens) + asked_row.reads[0].offset]
        values.append(logits.float().log_softmax(-1)[list(LABELS)].exp().double().numpy())
    return np.array(values)


def difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The largest difference of a probability."""
    return float(np.abs(a - b).max())
