"""Score the cases with what ships: the engine itself, its prompt, its labels, its batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.records import RequestRecord, RowAnswer
from tests.benchmarks.quality.scoring import Case, Scored


async def shipped(folder: Path, dtype: Literal["float32", "bfloat16"], cases: Sequence[Case]) -> list[Scored]:
    """The engine's answer to every case, one request per state. Raises RuntimeError where a question failed."""
    config = ModelConfig(model=str(folder), backend="torch", device="cpu", dtype=dtype, timeout=3600)
    engine = Engine(config, folder)
    await engine.start()
    scored: list[Scored] = []
    try:
        for state, group in groupby(cases, key=lambda case: case.state):
            request = RequestRecord("quality", (state,), tuple(case.question for case in group))
            answers: dict[int, RowAnswer] = {}
            async for outcomes in engine.decide(request):
                for outcome in outcomes:
                    if not isinstance(outcome, RowAnswer):
                        raise RuntimeError(f"{outcome.error.code}: {outcome.error.message}")
                    answers[outcome.row] = outcome
            for _, answer in sorted(answers.items()):
                scored.append(Scored(answer.probabilities, answer.label_mass, answer.input_tokens))
    finally:
        await engine.stop(0)
    return scored
