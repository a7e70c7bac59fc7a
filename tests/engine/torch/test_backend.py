"""Rows that fail alone, memory that runs out, budgets, and the constant head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sakuradite.engine.backend import Group, OutOfDeviceMemory, Prefix, Read, Row
from sakuradite.errors import ContextExceededError, InferenceFailedError
from tests.engine.torch.prompts import LABELS, difference, group, loaded, plain, probabilities, row, tokens


@pytest.fixture(params=["llama", "lfm2", "bamba"], ids=["packed", "cloned", "padded"])
def checkpoint(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    return tiny(request.param)


def test_a_poisoned_row_fails_alone(checkpoint: Path) -> None:
    """Over-long, empty, outside the vocabulary, reading nowhere: each has its own error, the others their answers."""
    backend = loaded(checkpoint)
    good, prefix = row(1, 6), Prefix(tokens(9, 10))
    read = (Read(0, LABELS),)
    bad = {
        "over the context": Row(tokens(2, backend.facts.context_length), read),
        "empty": Row((), read),
        "nothing to read": Row((7,), ()),
        "token outside": Row((backend.facts.vocabulary_size,), read),
        "negative token": Row((-1,), read),
        "label outside": Row((7,), (Read(0, (backend.facts.vocabulary_size,)),)),
        "read outside": Row((7,), (Read(1, LABELS),)),
    }
    scores = backend.score([Group(prefix, [good, *bad.values(), good])])[0]
    errors = dict(zip(bad, scores[1:-1], strict=True))
    assert isinstance(errors.pop("over the context"), ContextExceededError)
    assert {name for name, error in errors.items() if not isinstance(error, InferenceFailedError)} == set()
    expected = probabilities(backend, Group(Prefix(prefix.tokens), [good]))[0][0]
    for answer in (scores[0], scores[-1]):
        assert not isinstance(answer, Exception)
        assert difference(np.exp(answer[0].astype(float)), expected) < 1e-6


def test_a_broken_prefix_fails_its_request_alone(checkpoint: Path) -> None:
    backend = loaded(checkpoint)
    broken = Group(Prefix((5, 10**9)), [row(1, 3)])
    scores = backend.score([broken, group(2, 4, (3,))])
    assert isinstance(scores[0][0], InferenceFailedError)
    assert not isinstance(scores[1][0], Exception)


def test_numbers_that_are_none_fail_alone(checkpoint: Path) -> None:
    """A token whose embedding is NaN poisons the rows that hold it, and no other."""
    backend = loaded(checkpoint)
    with torch.no_grad():
        backend._model.get_input_embeddings().weight[7] = float("nan")
    scores = backend.score([Group(Prefix(tokens(1, 8)), [row(1, 4), Row((9, 7, 8), (Read(2, LABELS),)), row(2, 4)])])
    kinds = [isinstance(s, InferenceFailedError) for s in scores[0]]
    assert kinds == [False, True, False]


def test_several_reads_of_a_row(checkpoint: Path) -> None:
    """Reads at several places, two at one place with label lists of different length, in the order asked."""
    backend = loaded(checkpoint)
    suffix = tokens(3, 9)
    reads = (Read(8, LABELS), Read(2, LABELS[:1]), Read(8, LABELS[2:]))
    found = backend.score([Group(Prefix(tokens(4, 12)), [Row(suffix, reads)])])[0][0]
    assert not isinstance(found, Exception)
    assert [len(scores) for scores in found] == [len(LABELS), 1, len(LABELS) - 2]
    assert found[2].tolist() == found[0][2:].tolist()
    single = backend.score([Group(Prefix(tokens(4, 12)), [Row(suffix[:3], (Read(2, LABELS),))])])[0][0]
    assert not isinstance(single, Exception)
    assert abs(found[1][0] - single[0][0]) < 1e-5


def test_without_a_prefix(checkpoint: Path) -> None:
    asked = group(3, 0, (6, 1))
    answered = probabilities(loaded(checkpoint), asked)[0]
    assert difference(answered, plain(checkpoint, "float32", asked)) < 1e-5


def test_a_prefix_over_the_cache_budget_takes_the_plain_path(checkpoint: Path) -> None:
    backend = loaded(checkpoint, max_cache_bytes=0)
    asked = group(3, 20, (6, 9))
    answered = probabilities(backend, asked)[0]
    assert asked.prefix.cache is None
    assert difference(answered, plain(checkpoint, "float32", asked)) < 1e-5


@pytest.mark.parametrize("max_batch_tokens", [8, 33])
def test_small_forwards_give_the_same_answers(checkpoint: Path, max_batch_tokens: int) -> None:
    """Prefixes and batches are cut into forwards under the token budget."""
    backend = loaded(checkpoint, max_batch_tokens=max_batch_tokens)
    head = tokens(1, 11)
    backend.set_head(head)
    asked = [group(3, 50, (6, 9, 20), head), group(4, 8, (5,), head)]
    for answered, request in zip(probabilities(backend, *asked), asked, strict=True):
        assert difference(answered, plain(checkpoint, "float32", request)) < 1e-5


def test_the_head_is_computed_once(tiny: Callable[..., Path]) -> None:
    """With a head, a request costs the tokens behind it."""
    backend = loaded(tiny("llama"))
    seen: list[int] = []
    backend._model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    head = tokens(1, 40)
    backend.set_head(head)
    probabilities(backend, group(2, 10, (5,), head))
    probabilities(backend, group(3, 12, (6,), head), group(4, 3, (2,)))
    assert seen == [40, 15, 12 + 6 + 3 + 2]


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfDeviceMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), OutOfDeviceMemory),
        (RuntimeError("MPS backend out of memory"), OutOfDeviceMemory),
        (MemoryError(), OutOfDeviceMemory),
        (RuntimeError("shape mismatch"), RuntimeError),
    ],
)
def test_running_out_of_memory(
    raised: Exception, caught: type[Exception], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine can halve the batch and go on: a half-filled prefix is not continued."""
    backend = loaded(checkpoint)
    asked = group(2, 10, (5, 3))
    expected = probabilities(backend, asked)[0]
    backend.release(asked.prefix)

    def fail(*_: Any, **__: Any) -> None:
        raise raised

    with monkeypatch.context() as patch:
        patch.setattr(backend._model.get_output_embeddings(), "forward", fail)
        with pytest.raises(caught):
            backend.score([asked])
    assert asked.prefix.cache is None
    assert difference(probabilities(backend, asked)[0], expected) < 1e-6


def test_facts(checkpoint: Path) -> None:
    facts = loaded(checkpoint, "bfloat16").facts
    assert facts.device == "cpu"
    assert facts.dtype == "bfloat16"
    assert facts.context_length == 4096
    assert facts.weight_bytes >= 2 * facts.parameters
    assert facts.layout_reason
