"""Requests with images beside one another: they share forwards, and none moves another's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Group
from sakuradite.engine.compile import Compiler
from sakuradite.engine.illustrated import Illustrator
from sakuradite.engine.pictures import Pictures
from sakuradite.engine.plan import Plan
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.engine.torch import load, tower
from sakuradite.engine.torch import padded as padded_layout
from sakuradite.images import illustrated
from sakuradite.questions import Choice, Noul, question_record
from sakuradite.records import RequestRecord
from tests.engine.torch.test_images import png
from tests.picturing import PICTURED

URGENT = question_record(Noul(instructions="Is this urgent?"))
NATURAL = question_record(Noul(instructions="Is this natural?"))
TEAM = question_record(Choice(instructions="Which team?", criteria={"billing": "invoices", "shipping": None}))
SIZES = ((90, 60), (30, 40))
"""Of the images of the request that is asked about."""

type Answers = list[NDArray[np.float64]]


@cache
def compiler(folder: Path) -> Compiler:
    tokenizer = FastTokenizer(folder)
    return Compiler(tokenizer, "m", 4096, illustrator=Illustrator(tokenizer, Pictures(folder, tokenizer)))


def groups(
    folder: Path, seed: int, sizes: Sequence[tuple[int, int]], *questions: Any, state: str = "Text."
) -> list[Group]:
    """A compiled request with images of these sizes."""
    files = tuple(png(size, 10 * seed + i) for i, size in enumerate(sizes))
    (plan,) = compiler(folder).compile([RequestRecord("r", illustrated(state, len(files)), questions, files)])
    assert isinstance(plan, Plan)
    return [Group(question.prefix, question.rows) for question in plan.questions]


def loaded(folder: Path, dtype: str = "float32") -> Any:
    return load(ModelConfig(model="m", device="cpu", dtype=dtype, num_cpus=1), folder)


def answers(backend: Any, asked: Sequence[Group]) -> Answers:
    """Per group the probabilities of its first row's labels, normalised as answers are."""
    found = []
    for scores in backend.score(asked):
        assert isinstance(scores[0], tuple), scores
        values = np.exp(scores[0][0].astype(np.float64))
        found.append(values / values.sum())
    return found


def towers_of(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the length of what the vision tower is given, call by call."""
    seen: list[int] = []
    see = backend._model.get_image_features

    def looking(**given: Any) -> Any:
        seen.append(len(given["pixel_values"]))
        return see(**given)

    monkeypatch.setattr(backend._model, "get_image_features", looking)
    return seen


def forwards_of(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the rows of each forward of the language model."""
    rows: list[int] = []
    call = backend._illustrated._caller.logits

    def calling(ids: Any, *args: Any, **given: Any) -> Any:
        rows.append(len(ids))
        return call(ids, *args, **given)

    monkeypatch.setattr(backend._illustrated._caller, "logits", calling)
    return rows


def company(folder: Path) -> list[Group]:
    """Others: images of the same sizes, of other sizes, more of them, and text alone."""
    return [
        *groups(folder, 2, SIZES, URGENT, TEAM),
        *groups(folder, 3, ((200, 20),), URGENT),
        *groups(folder, 4, (*SIZES, (64, 64)), NATURAL, state="A longer text, for another length. " * 4),
        *groups(folder, 5, (), URGENT, TEAM),
    ]


def moved(folder: Path, dtype: str) -> float:
    """The most that company moves a probability, over its position in the batch."""
    backend = loaded(folder, dtype)
    alone = answers(backend, groups(folder, 1, SIZES, URGENT, TEAM))
    furthest = 0.0
    for position in (0, 3, 6):
        others = company(folder)  # anew: what the tower has seen it does not see again
        ours = groups(folder, 1, SIZES, URGENT, TEAM)
        found = answers(backend, [*others[:position], *ours, *others[position:]])[position : position + 2]
        furthest = max(furthest, *(float(np.abs(a - b).max()) for a, b in zip(alone, found, strict=True)))
    return furthest


@pytest.mark.parametrize("padded", [False, True], ids=["of one length", "padded"])
@pytest.mark.parametrize("architecture", PICTURED)
def test_company_moves_nothing_in_float32(
    architecture: str, padded: bool, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if padded:  # as on a GPU, where rows of different lengths share a forward
        monkeypatch.setattr(padded_layout, "CPU_PADDING", 9.0)
    assert moved(tiny(architecture), "float32") < 1e-5


@pytest.mark.parametrize("architecture", PICTURED)
def test_company_moves_little_in_bfloat16(architecture: str, tiny: Callable[..., Path]) -> None:
    assert moved(tiny(architecture), "bfloat16") < 0.05


@pytest.mark.parametrize("architecture", PICTURED)
def test_different_images_share_forwards(
    architecture: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the tower for images of one shape, one of the language model for rows of one length; storage is own."""
    folder = tiny(architecture)
    backend = loaded(folder)
    towers = towers_of(backend, monkeypatch)
    rows = forwards_of(backend, monkeypatch)
    requests = [groups(folder, seed, SIZES, URGENT) for seed in (1, 2, 3)]
    answers(backend, [group for request in requests for group in request])
    assert (len(towers), rows) == (1, [3])
    kept = [request[0].prefix.extras["images"].features.pooler_output for request in requests]
    places = {tensor.untyped_storage().data_ptr() for stack in kept for tensor in stack}
    assert len(places) >= len(requests)
    answers(backend, groups(folder, 4, SIZES, URGENT) + groups(folder, 5, SIZES[1:], URGENT))
    assert len(towers) == 3  # of other shapes: each by itself


def test_the_tower_sees_a_bounded_part_at_a_time(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("idefics3")
    backend = loaded(folder)
    requests = [groups(folder, seed, SIZES, URGENT)[0] for seed in range(5)]
    expected = [answers(backend, groups(folder, seed, SIZES, URGENT))[0] for seed in range(5)]
    monkeypatch.setattr(tower, "TOWER_BYTES", 2 * requests[0].prefix.extras["images"].nbytes)
    seen = towers_of(backend, monkeypatch)
    found = answers(backend, requests)
    assert seen == [2, 2, 1]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_family_that_was_not_compared_runs_set_by_set_and_says_so(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("smolvlm")
    together = answers(loaded(folder), groups(folder, 1, SIZES, URGENT) + groups(folder, 2, SIZES, URGENT))
    monkeypatch.setattr(tower, "COMPARED", frozenset())
    backend = loaded(folder)
    assert backend.facts.warnings == (
        "different images never share a batch: smolvlm is not among the families compared",
    )
    rows = forwards_of(backend, monkeypatch)
    apart = answers(backend, groups(folder, 1, SIZES, URGENT, URGENT) + groups(folder, 2, SIZES, URGENT))
    assert rows == [2, 1]
    assert apart[0] == pytest.approx(together[0], abs=1e-5)
    assert apart[2] == pytest.approx(together[1], abs=1e-5)


def test_the_families_compared_here_are_the_ones_that_share() -> None:
    assert set(PICTURED) == tower.COMPARED
