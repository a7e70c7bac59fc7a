"""Whole requests on a real model in miniature, against probabilities worked out by hand from plain forwards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from sakuradite.config import ModelConfig
from sakuradite.engine.compile import Compiler
from sakuradite.engine.engine import Engine
from sakuradite.engine.loading import Loader, load
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.questions import Choice, Noul, Score, question_record
from sakuradite.records import QuestionRecord, RequestRecord, RowAnswer
from tests.engine.plain import PlainBackend, load_plain

STATE = "The customer was charged twice and wants a refund before Friday. <|im_end|> ünïcode ✓"
QUESTIONS = (
    question_record(Noul(instructions="Is this urgent?")),
    question_record(Choice(instructions="Which team?", criteria={"billing": "invoices", "shipping": None})),
    question_record(Score(criteria=["low", "neutral", "high"])),
    question_record(Choice(criteria={str(i): None for i in range(60)})),
)


def by_hand(compiler: Compiler, backend: PlainBackend, question: QuestionRecord) -> tuple[list[float], float, int]:
    """Probabilities, label mass and prompt length from forwards of the whole prompt followed by each label."""
    labels = compiler.book.labels(question.kind, len(question.candidates))
    (plan,) = compiler.compile([RequestRecord("", (STATE,), (question,))])
    assert not isinstance(plan, Exception)
    planned = plan.questions[0]
    prompt = planned.prefix.tokens + planned.rows[0].suffix
    if len(labels.paths[0]) == 2:  # its rows end with a label's first token
        prompt = prompt[:-1]
    after: dict[tuple[int, ...], float] = {}
    known: dict[int, list[list[float]]] = {}
    for path in labels.paths:
        if path[0] not in known:
            known[path[0]] = backend.log_probabilities([*prompt, path[0]])[-2:].tolist()
        first, second = known[path[0]]
        after[path] = first[path[0]] + (second[path[1]] if len(path) == 2 else 0.0)
    joint = [math.exp(after[path]) for path in labels.paths]
    return [p / math.fsum(joint) for p in joint], math.fsum(joint), len(prompt)


@pytest.mark.parametrize("loader", [load_plain, load], ids=["plain", "torch"])
@pytest.mark.parametrize(
    ("architecture", "template"), [("llama", "chatml"), ("gemma3_text", "none"), ("gpt2", "thinking")]
)
async def test_served_scores_differ_from_the_reference(
    architecture: str, template: str, loader: Loader, tiny: Callable[..., Path]
) -> None:
    """Case 23: every kind, and labels of two tokens, on the tokens of one prompt each."""
    folder = tiny(architecture, template=template, adds_bos=template == "none")
    compiler, backend = Compiler(FastTokenizer(folder), "m", 4096), PlainBackend(folder)
    # The tiny tokenizer splits digits and has no merges of capitals, so 60 options need labels of two tokens.
    assert {len(path) for path in compiler.book.labels("choice", 60).paths} == {2}
    config = ModelConfig(model="m", backend="torch", device="cpu", dtype="float32", max_input_tokens=4096)
    engine = Engine(config, folder, load=loader)
    await engine.start()
    request = RequestRecord("r", (STATE,), QUESTIONS)
    found = {outcome.row: outcome async for group in engine.decide(request) for outcome in group}
    await engine.stop(drain=0)
    for index, question in enumerate(QUESTIONS):
        probabilities, mass, length = by_hand(compiler, backend, question)
        answer = found[index]
        assert isinstance(answer, RowAnswer)
        assert answer.input_tokens == length
        assert answer.label_mass == pytest.approx(mass, rel=1e-4)
        assert answer.probabilities == pytest.approx(probabilities, abs=1e-5)
        assert max(probabilities) - min(probabilities) > 1e-4  # the model does tell the options apart


async def test_company_moves_no_answer_of_a_real_model(tiny: Callable[..., Path]) -> None:
    """Case 22, in float32: one question alone, then with 31 others and 15 other requests in the same batches."""
    config = ModelConfig(model="m", backend="torch", device="cpu", dtype="float32", max_batch_size=64)
    engine = Engine(config, tiny("llama"), load=load)
    await engine.start()

    async def ask(request: RequestRecord) -> list[RowAnswer]:
        found = [o async for group in engine.decide(request) for o in group if isinstance(o, RowAnswer)]
        return sorted(found, key=lambda answer: answer.row)

    alone = [(await ask(RequestRecord("r", (STATE,), (question,))))[0] for question in QUESTIONS]
    company = tuple(question_record(Noul(instructions=f"Is it {'very ' * i}urgent?")) for i in range(31))
    others = [RequestRecord("o", (f"state {i} " * i,), (QUESTIONS[i % 3], company[i])) for i in range(15)]
    mixed = RequestRecord("r", (STATE,), (*company, *reversed(QUESTIONS)))
    found, *_ = await asyncio.gather(ask(mixed), *(ask(other) for other in others))
    await engine.stop(drain=0)
    for mine, again in zip(alone, reversed(found[len(company) :]), strict=True):
        assert again.probabilities == pytest.approx(mine.probabilities, abs=1e-5)
        assert again.input_tokens == mine.input_tokens
