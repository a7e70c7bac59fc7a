"""Score the cases with several wordings on one checkpoint: the engine's prompts, the plain forward of Transformers.

Many rows are packed in one sequence, and the rows of a state share its tokens. A mask keeps every row to its own state
and question, so packing changes nothing but the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sakuradite.engine.compile import Compiler
from sakuradite.engine.plan import PlannedQuestion
from sakuradite.engine.prompt import Wording
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.errors import APIError
from sakuradite.questions import Question, question_record, render
from sakuradite.records import QuestionRecord, RequestRecord

type Part = tuple[list[int], list[list[int]]]
"""A prefix and the rows that go on from it, as tokens."""

CASES = Path(__file__).with_name("cases.jsonl")
PACKED_TOKENS = 900  # of one forward: enough for matrix speed on a CPU, small enough for the quadratic mask


@dataclass(frozen=True, slots=True)
class Case:
    """One question with the index of the candidate that is right."""

    state_id: str
    domain: str
    state: str
    question: QuestionRecord
    right: int


@dataclass(frozen=True, slots=True)
class Scored:
    """The probabilities of a case, in candidate order, and the mass of all labels before they were normalised."""

    probabilities: tuple[float, ...]
    mass: float
    tokens: int


def read_cases() -> list[Case]:
    """The frozen cases, in the order of the file."""
    cases = []
    parse = TypeAdapter[Any](Question).validate_python
    for line in CASES.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for item in entry["questions"]:
            record = question_record(parse(item["question"]))
            answer = item["answer"]
            if record.kind == "choice":
                right = [c.name for c in record.candidates].index(answer)
            else:
                right = (0 if answer else 1) if record.kind == "noul" else answer
            cases.append(Case(entry["id"], entry["domain"], render(entry["state"]), record, right))
    return cases


@dataclass(frozen=True, slots=True)
class Run:
    """A wording, with the candidates in the order given or turned round (the levels of a score keep theirs)."""

    wording: Wording
    turned: bool = False


class Model:
    """A checkpoint: the engine's tokenizer and prompts, and the plain forward of Transformers."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.name = folder.name
        self.tokenizer = FastTokenizer(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def forward(self, parts: Sequence[Part]) -> list[Any]:
        """For each row of each part, log-probabilities of the next token over the vocabulary."""
        import torch

        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        owner: list[int] = []
        shared: list[int] = []  # for each segment, the one it may see besides itself
        for prefix, rows in parts:
            first = len(shared)
            for i, part in enumerate([prefix, *rows]):
                start = len(prefix) if i else 0
                ids += part
                positions += range(start, start + len(part))
                owner += [len(shared)] * len(part)
                shared.append(first)
                if i:
                    last.append(len(ids) - 1)
        own = torch.tensor(owner)
        visible = ((own[:, None] == own[None]) | (torch.tensor(shared)[own][:, None] == own[None])).tril()
        dtype = self.model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                attention_mask=mask[None, None],
                logits_to_keep=torch.tensor(last),
                use_cache=False,
            ).logits[0]
        return list(logits.float().log_softmax(-1))


def score(model: Model, runs: Sequence[Run], cases: Sequence[Case]) -> list[list[Scored]]:
    """For each run, the probabilities of every case. The runs share one head, and so each state's tokens."""
    compilers = [_compiler(model, run) for run in runs]
    (_,) = {compiler.head for compiler in compilers}
    scored: list[list[Scored]] = [[] for _ in runs]
    pack = _Pack()
    for state, group in groupby(cases, key=lambda case: case.state):
        asked = list(group)
        for i, (run, compiler) in enumerate(zip(runs, compilers, strict=True)):
            if pack.size > PACKED_TOKENS:
                pack.read(model, scored)
                pack = _Pack()
            questions = [_turned(case.question) if run.turned else case.question for case in asked]
            (plan,) = compiler.compile([RequestRecord("quality", (state,), tuple(questions))])
            if isinstance(plan, APIError) or plan.failures:
                raise RuntimeError(f"not every question could be compiled: {plan}")
            for question, case in zip(plan.questions, asked, strict=True):
                pack.add(i, question, backwards=run.turned and case.question.kind == "choice")
    pack.read(model, scored)
    return scored


def _compiler(model: Model, run: Run) -> Compiler:
    """The engine's compiler for a run; a noul is turned by its wording, a choice by its candidates."""
    wording = replace(run.wording, noul_turned=run.wording.noul_turned != run.turned)
    return Compiler(model.tokenizer, model.name, 8192, wording)


def _turned(question: QuestionRecord) -> QuestionRecord:
    if question.kind != "choice":
        return question
    return replace(question, candidates=question.candidates[::-1])


class _Pack:
    """Rows of several states that go through one forward. A row that several runs have in common goes once."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: list[Part] = []
        self.places: dict[tuple[int, ...], int] = {}  # of the rows of the last part, among all rows
        self.reads: list[tuple[int, int, PlannedQuestion, bool]] = []

    def add(self, run: int, question: PlannedQuestion, backwards: bool) -> None:
        prefix, (row,) = list(question.prefix.tokens), question.rows
        if not self.parts or self.parts[-1][0] != prefix:
            self.parts.append((prefix, []))
            self.places = {}
            self.size += len(prefix)
        if row.suffix not in self.places:
            self.places[row.suffix] = sum(len(rows) for _, rows in self.parts)
            self.parts[-1][1].append(list(row.suffix))
            self.size += len(row.suffix)
        self.reads.append((run, self.places[row.suffix], question, backwards))

    def read(self, model: Model, scored: list[list[Scored]]) -> None:
        logs = model.forward(self.parts)
        for run, place, question, backwards in self.reads:
            weights = [math.exp(logs[place][token].item()) for (token,) in question.labels.paths]
            mass = sum(weights)
            p = [weight / mass for weight in weights]
            scored[run].append(Scored(tuple(reversed(p) if backwards else p), mass, question.input_tokens))
