"""Official clients and the conformance suite against the real processes: daemon, router, two replicas of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import typesafe_sdk
from jevcompat import runner

from tests.cluster.conftest import Daemon

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
KEY = "sk-conformance"


def failures(url: str, key: str | None, model: str) -> list[str]:
    """Requirements that jevcompat finds broken; it must have run to its end."""
    report = runner.run(url, key=key, model=model)
    assert report.aborted is None
    assert report.verdict == "conformant", [(r.id, r.findings) for r in report.results if r.status == "fail"]
    return [r.id for r in report.results if r.status == "fail"]


@pytest.mark.parametrize("key", [None, KEY])
def test_two_replicas_conform_by_id_and_by_alias(daemons: Callable[..., Daemon], key: str | None) -> None:
    daemon = daemons(**({"api_key": key} if key else {}))
    assert daemon.load(model="fake", replicas=2, max_input_tokens=1 << 16)["status"] == "succeeded"
    for name in ("fake", "jev-latest"):
        assert failures(daemon.url, key, name) == []
    with typesafe_sdk.TypeSafeClient(api_key=key or "any", base_url=daemon.url) as client:
        question = typesafe_sdk.Choice(instructions="Which?", criteria={"a": None, "한국어": None})
        answered = client.system_one(state="x" * 3000, questions={"q": question})
        assert (answered.model, set(answered.choices["q"].probabilities)) == ("fake", {"a", "한국어"})
    with openai.OpenAI(api_key=key or "any", base_url=f"{daemon.url}/v1") as other:
        predicate: Any = {"type": "predicate", "instructions": "It is about money.", "name": "money"}
        decided = other.decisions.create(model="default", input="x" * 100, questions=[predicate])
        assert decided.model == "fake"
        assert decided.answers[0].name == "money"


def test_a_real_checkpoint_conforms(daemons: Callable[..., Daemon], tiny: Callable[..., Path]) -> None:
    daemon = daemons()
    # 255 described options are some 10,000 tokens to this tokenizer of few merges.
    checkpoint = str(tiny("llama", config={"max_position_embeddings": 1 << 15}))
    limits = {"max_input_tokens": 1 << 15, "max_batch_tokens": 1 << 15}
    loaded = daemon.load(model=checkpoint, backend="torch", dtype="float32", num_cpus=1, **limits)
    assert loaded["status"] == "succeeded", loaded
    assert failures(daemon.url, None, checkpoint) == []
