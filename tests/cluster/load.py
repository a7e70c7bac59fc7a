"""A client load whose every answer is known beforehand: what was lost, how slow it got, when it was well again.

    with Load(url, "fake", cases) as load:
        time.sleep(1); load.fault(); kill(); time.sleep(10)
    report = load.report()      # report.wrong must be empty

Expected answers come from an `Engine` in this process: no router, no Ray, no HTTP has touched them.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sakuradite import Choice, Noul, Sakuradite, Score
from sakuradite.answers import DecisionResult, result
from sakuradite.client.request import decision
from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.errors import APIError, TransportError
from sakuradite.records import RowAnswer

WORDS = ("parcel", "late", "refund", "billing", "angry", "twice", "invoice", "monday", "nobody", "answers", "broken")
SLOW_SECONDS = 1.0
"""A small request that took longer was disturbed; without a fault it takes a hundredth of that."""


@dataclass(frozen=True)
class Case:
    """A request and its answers, as `DecisionResult.model_dump()["answers"]`."""

    kind: str
    state: str
    questions: dict[str, Noul | Choice | Score]
    answers: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """What became of one request. `outcome` is "ok", "WRONG", or the code of the error."""

    start: float
    end: float
    kind: str
    outcome: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Report:
    """A load's samples around one moment."""

    samples: list[Sample]
    fault: float

    @property
    def wrong(self) -> list[Sample]:
        return [s for s in self.samples if s.outcome == "WRONG"]

    @property
    def lost(self) -> Counter[str]:
        """Requests that failed, by code."""
        return Counter(s.outcome for s in self.samples if s.outcome not in ("ok", "WRONG"))

    @property
    def answered_after(self) -> int:
        """Good answers to requests that began after the fault."""
        return sum(s.outcome == "ok" and s.start > self.fault for s in self.samples)

    @property
    def worst(self) -> float:
        """The longest time of a good answer after the fault, in seconds."""
        return max((s.seconds for s in self.samples if s.outcome == "ok" and s.end > self.fault), default=0.0)

    @property
    def recovered(self) -> float:
        """Seconds from the fault to the end of the last request that failed or was slow; 0 where none was."""
        disturbed = [
            s.end - self.fault
            for s in self.samples
            if s.end > self.fault and (s.outcome != "ok" or (s.kind == "small" and s.seconds > SLOW_SECONDS))
        ]
        return max(disturbed, default=0.0)


def questions(number: int, seed: int) -> dict[str, Noul | Choice | Score]:
    """Questions of all three kinds, different for every seed."""
    found: dict[str, Noul | Choice | Score] = {}
    for i in range(number):
        word = WORDS[(seed + i) % len(WORDS)]
        match i % 3:
            case 0:
                found[f"q{i}"] = Choice(instructions=f"Which one of {seed}, {i}?", criteria={word: None, "other": word})
            case 1:
                found[f"q{i}"] = Noul(instructions=f"It is about {word} {seed}.")
            case _:
                found[f"q{i}"] = Score(instructions=f"How {word}, {seed}?", criteria=["little", "some", "much"])
    return found


def cases(config: ModelConfig, checkpoint: Path | None = None, small: int = 24, large: int = 3) -> list[Case]:
    """Many small requests and some large ones (60 questions about 4 KB), with what the model answers to them."""

    async def answers() -> list[Case]:
        engine = Engine(config, checkpoint)
        await engine.start()
        found = [await _case(engine, "small", " ".join(WORDS[i % 7 :]), questions(1 + i % 3, i)) for i in range(small)]
        found += [await _case(engine, "large", " ".join(WORDS) * 50 + str(i), questions(60, i)) for i in range(large)]
        await engine.stop(0)
        return found

    return asyncio.run(answers())


async def _case(engine: Engine, kind: str, state: str, asked: dict[str, Noul | Choice | Score]) -> Case:
    rows: dict[int, RowAnswer] = {}
    async for outcomes in engine.decide(decision("m", state, asked).record()):
        for outcome in outcomes:
            assert isinstance(outcome, RowAnswer), outcome
            rows[outcome.row] = outcome
    return Case(kind, state, asked, result("m", asked, rows).model_dump()["answers"])


def same(answers: Any, expected: Any, tolerance: float) -> bool:
    """Whether answers are the expected ones: texts and keys to the letter, numbers within the tolerance."""
    if isinstance(expected, dict):
        return (
            isinstance(answers, dict)
            and list(answers) == list(expected)
            and all(same(answers[key], value, tolerance) for key, value in expected.items())
        )
    if isinstance(expected, float):
        return isinstance(answers, float) and abs(answers - expected) <= tolerance
    return bool(answers == expected)


class Load:
    """Callers that ask one request after the other until the context ends. `tolerance` is that of the model's dtype."""

    def __init__(
        self,
        url: str,
        model: str,
        known: Sequence[Case],
        *,
        small: int = 6,
        large: int = 1,
        retries: int = 0,
        tolerance: float = 0.0,
        pause: float = 0.0,
        api_key: str | None = None,
    ) -> None:
        self.samples: list[Sample] = []
        self._url, self._model, self._retries, self._tolerance = url, model, retries, tolerance
        self._pause, self._api_key = pause, api_key
        self._known = {kind: [c for c in known if c.kind == kind] for kind in ("small", "large")}
        self._callers = ["small"] * small + ["large"] * large
        self._fault = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def fault(self) -> None:
        """The moment from which the report counts."""
        self._fault = time.monotonic()

    def report(self) -> Report:
        return Report(list(self.samples), self._fault)

    def wait_for(self, more: int, seconds: float = 60) -> bool:
        """Whether so many further good answers came within some time."""
        end, enough = time.monotonic() + seconds, self._good() + more
        while self._good() < enough and time.monotonic() < end:
            time.sleep(0.02)
        return self._good() >= enough

    def _good(self) -> int:
        return sum(s.outcome == "ok" for s in self.samples)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with Sakuradite(self._model, base_url=self._url, retries=self._retries, api_key=self._api_key) as client:
            await asyncio.gather(*(self._caller(client, kind, i) for i, kind in enumerate(self._callers)))

    async def _caller(self, client: Any, kind: str, number: int) -> None:
        known = self._known[kind]
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            case = known[turn % len(known)]
            start = time.monotonic()
            outcome = await self._ask(client, case)
            self.samples.append(Sample(start, time.monotonic(), kind, outcome))
            await asyncio.sleep(self._pause if outcome == "ok" else 0.05)

    async def _ask(self, client: Any, case: Case) -> str:
        try:
            found: DecisionResult = await client.decide(state=case.state, questions=case.questions)
        except APIError as error:
            return error.code
        except TransportError:
            return "transport"
        return "ok" if same(found.model_dump()["answers"], case.answers, self._tolerance) else "WRONG"


def table(rows: Iterable[tuple[str, Report, str]]) -> str:
    """The reports as Markdown: fault, requests, lost by code, worst latency, time to recover, a remark."""
    lines = [
        "| fault | requests | lost | worst answer | normal again after | remark |",
        "|---|---|---|---|---|---|",
    ]
    for name, report, remark in rows:
        lost = ", ".join(f"{n} {code}" for code, n in sorted(report.lost.items())) or "0"
        measured = f"{len(report.samples):,} | {lost} | {report.worst:.2f} s | {report.recovered:.1f} s"
        lines.append(f"| {name} | {measured} | {remark} |")
    return "\n".join(lines)
