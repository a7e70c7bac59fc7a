"""What the engine costs around a forward: admission, compilation, batches, readout, with a model that computes nothing.

    python -m tests.benchmarks.engine_front [CHECKPOINT]

With a checkpoint folder its tokenizer is used, else one token per byte. Prints, per number of callers, requests per
second and microseconds of the process per request.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

from sakuradite.config import ModelConfig
from sakuradite.engine import fake
from sakuradite.engine.backend import Backend
from sakuradite.engine.engine import Engine
from sakuradite.engine.tokenizer import FastTokenizer, Tokenizer
from sakuradite.questions import Choice, Noul, question_record
from sakuradite.records import QuestionRecord, RequestRecord

STATE = "My parcel arrived five days late, the box was crushed and nobody answers the telephone. I want a refund. " * 4
TEAM = question_record(Choice(instructions="Which team?", criteria={"billing": "invoices, refunds", "shipping": None}))
SECONDS = 2.0


def load(config: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer, Backend]:
    """The fake backend behind a real tokenizer."""
    tokenizer, backend = fake.load(config)
    return (FastTokenizer(checkpoint) if checkpoint else tokenizer), backend


async def measure(engine: Engine, callers: int, questions: tuple[QuestionRecord, ...]) -> tuple[float, float, float]:
    """Requests per second, microseconds of processor time per request, median latency in microseconds."""
    request = RequestRecord("r", (STATE,), questions)
    latencies: list[float] = []
    end = time.perf_counter() + SECONDS

    async def caller() -> None:
        while (started := time.perf_counter()) < end:
            async for _ in engine.decide(request):
                pass
            latencies.append(time.perf_counter() - started)

    processor, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    return len(latencies) / seconds, processor / len(latencies) * 1e6, statistics.median(latencies) * 1e6


async def main(checkpoint: Path | None) -> None:
    """Print the table."""
    engine = Engine(ModelConfig(model="fake", backend="fake"), checkpoint, load=load)
    await engine.start()
    print("questions  callers  requests/s  processor us/request  median us")
    for questions in ((TEAM,), tuple(question_record(Noul(instructions=f"Is it {i}?")) for i in range(32))):
        for callers in (1, 16, 64):
            rate, processor, latency = await measure(engine, callers, questions)
            print(f"{len(questions):9d}  {callers:7d}  {rate:10.0f}  {processor:20.0f}  {latency:9.0f}")
    await engine.stop(drain=1)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
