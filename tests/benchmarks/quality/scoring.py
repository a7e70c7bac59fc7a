"""Score the cases with one wording on one checkpoint: plain Transformers, many rows packed in one sequence.

The rows of a state share its tokens. A mask keeps every row to its own state and question, so packing changes nothing
but the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched, groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sakuradite.questions import Question, question_record, render
from sakuradite.records import QuestionRecord
from tests.benchmarks.quality.wordings import Wording

CASES = Path(__file__).with_name("cases.jsonl")
PACKED_TOKENS = 900  # of one forward: enough for matrix speed on a CPU, small enough for the quadratic mask
MAX_ROWS = 24  # of one state in a forward


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


class Model:
    """A checkpoint and its tokenizer, with the frame that its chat template puts around one user turn."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        if self.tokenizer.chat_template is None:
            self.opening, self.closing = self.tokenizer.bos_token or "", "\n\n"
        else:
            turn = [{"role": "user", "content": "THEMARK"}]
            text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            self.opening, self.closing = text.split("THEMARK")

    def tokens(self, text: str) -> list[int]:
        """Token ids of a piece of the prompt, with nothing added."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def forward(self, prefixes: Sequence[tuple[list[int], list[list[int]]]]) -> list[Any]:
        """For each row of each prefix, log-probabilities of the next token over the vocabulary."""
        import torch

        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        owner: list[int] = []
        allowed: list[tuple[int, ...]] = []
        segment = 0
        for prefix, rows in prefixes:
            shared = segment
            for i, part in enumerate([prefix, *rows]):
                start = 0 if i == 0 else len(prefix)
                ids += part
                positions += range(start, start + len(part))
                owner += [segment] * len(part)
                allowed.append((segment,) if i == 0 else (shared, segment))
                if i:
                    last.append(len(ids) - 1)
                segment += 1
        own = torch.tensor(owner)
        first = torch.tensor([a[0] for a in allowed])[own]
        visible = ((own[:, None] == own[None]) | (first[:, None] == own[None])).tril()
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


@dataclass(frozen=True, slots=True)
class Run:
    """A wording, with the options in the order given or reversed."""

    wording: Wording
    reverse: bool = False


def score(model: Model, runs: Sequence[Run], cases: Sequence[Case]) -> list[list[Scored]]:
    """For each run, the probabilities of every case. The runs share one head, and so each state's tokens."""
    (head,) = {run.wording.head for run in runs}
    opening = model.tokens(model.opening + head)
    scored: list[list[Scored]] = [[] for _ in runs]
    pack = _Pack()
    for state, group in groupby(cases, key=lambda case: case.state):
        prefix = opening + model.tokens(state)
        rows = [(i, *_row(model, run, case.question)) for case in group for i, run in enumerate(runs)]
        for part in batched(rows, MAX_ROWS):
            if pack.size > PACKED_TOKENS:
                pack.read(model, scored)
                pack = _Pack()
            pack.add(prefix, part)
    pack.read(model, scored)
    return scored


class _Pack:
    """Rows of several states that go through one forward."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: list[tuple[list[int], list[list[int]]]] = []
        self.reads: list[tuple[int, list[int], int]] = []

    def add(self, prefix: list[int], rows: Sequence[tuple[int, list[int], list[int]]]) -> None:
        self.parts.append((prefix, [tokens for _, tokens, _ in rows]))
        self.reads += [(run, labels, len(prefix) + len(tokens)) for run, tokens, labels in rows]
        self.size += len(prefix) + sum(len(tokens) for _, tokens, _ in rows)

    def read(self, model: Model, scored: list[list[Scored]]) -> None:
        for logs, (run, labels, length) in zip(model.forward(self.parts), self.reads, strict=True):
            weights = [math.exp(logs[label].item()) for label in labels]
            mass = sum(weights)
            scored[run].append(Scored(tuple(w / mass for w in weights), mass, length))


def _row(model: Model, run: Run, question: QuestionRecord) -> tuple[list[int], list[int]]:
    """The tokens after the state, and the token of each candidate's label."""
    wording = run.wording
    codes = wording.codes(question)
    turned = run.reverse and question.kind != "score"  # levels keep their order
    if turned:
        candidates = tuple(reversed(question.candidates))
        if question.kind == "noul" and wording.noul is None:
            raise NotImplementedError("a noul asked as options names them Yes and No in this order")
        question = QuestionRecord(question.kind, question.instructions, candidates)
        codes = tuple(reversed(codes)) if question.kind == "noul" else codes
    cue, gap = wording.cue_of(codes)
    row = model.tokens(wording.text(question, codes) + model.closing + cue)
    labels = []
    closing = model.tokens(model.closing + cue)
    for code in codes:
        added = model.tokens(model.closing + cue + gap + code)
        if added[: len(closing)] != closing or len(added) != len(closing) + 1:
            raise ValueError(f"{code!r} is not one clean token after {cue + gap!r}")
        labels.append(added[-1])
    return row, labels[::-1] if turned else labels
