"""Company does not matter: an answer is the same alone and with other questions and other requests beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sakuradite.engine.backend import Group, Prefix
from sakuradite.engine.torch import linear
from tests.checkpoints import ARCHITECTURES
from tests.engine.torch.prompts import difference, group, loaded, probabilities, tokens

HEAD = tokens(1, 5)
BIT_FOR_BIT = sorted(set(ARCHITECTURES) - {"qwen3_moe", "olmoe", "gpt_oss", "lfm2", "qwen3_5_text", "nemotron_h"})
"""All but experts, whose products depend on how many tokens chose one, and hybrids, whose rows share a batch."""


def among(asked: Group, position: int) -> list[Group]:
    """A request of one question with 31 more questions, in the midst of 15 other requests."""
    more = group(50, 1, tuple(3 + i % 9 for i in range(31)))
    rows = [*more.rows[:position], asked.rows[0], *more.rows[position:]]
    others = [group(60 + i, 3 + 5 * i, (4 + i,), HEAD) for i in range(15)]
    return [*others[:7], Group(Prefix(asked.prefix.tokens), rows), *others[7:]]


def alone_and_in_company(checkpoint: Path, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    backend = loaded(checkpoint, dtype)
    backend.set_head(HEAD)
    asked = group(40, 30, (9,), HEAD)
    alone = probabilities(backend, asked)[0][0]
    company = probabilities(backend, *among(asked, 11))[7][11]
    return alone, company


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_company_moves_nothing_in_float32(architecture: str, tiny: Callable[..., Path]) -> None:
    assert difference(*alone_and_in_company(tiny(architecture), "float32")) < 1e-5


@pytest.mark.skipif(not linear.available(torch.device("cpu"), torch.bfloat16), reason="needs oneDNN's bfloat16")
@pytest.mark.parametrize("architecture", BIT_FOR_BIT)
def test_company_moves_not_a_bit_in_bfloat16(architecture: str, tiny: Callable[..., Path]) -> None:
    alone, company = alone_and_in_company(tiny(architecture), "bfloat16")
    assert alone.tolist() == company.tolist()


@pytest.mark.skipif(not linear.available(torch.device("cpu"), torch.bfloat16), reason="needs oneDNN's bfloat16")
@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(BIT_FOR_BIT)))
def test_company_moves_little_in_bfloat16_elsewhere(architecture: str, tiny: Callable[..., Path]) -> None:
    assert difference(*alone_and_in_company(tiny(architecture), "bfloat16")) < 5e-3


def test_a_later_batch_of_the_same_request_answers_alike(tiny: Callable[..., Path]) -> None:
    """The kept prefix gives what the fresh one gave; after release it is computed anew."""
    backend = loaded(tiny("llama"))
    asked = group(40, 30, (9, 4))
    first = probabilities(backend, asked)[0]
    assert asked.prefix.cache is not None
    assert probabilities(backend, asked)[0].tolist() == first.tolist()
    backend.release(asked.prefix)
    assert asked.prefix.cache is None
    assert probabilities(backend, asked)[0].tolist() == first.tolist()
