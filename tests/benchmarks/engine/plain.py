"""The plain loop that people write today: Transformers, complete rows, right-padded batches of 16."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.engine import limits

BATCH = 16


@dataclass(frozen=True)
class Timing:
    """Seconds by the clock and of the processor."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.3g} s ({self.cpu:.3g})"

    def times(self, factor: float) -> Timing:
        return Timing(self.wall * factor, self.cpu * factor)

    def over(self, other: Timing) -> str:
        """How many times as long this took as the other."""
        return f"{self.wall / other.wall:.2f} x ({self.cpu / other.cpu:.2f})"


def timed(run: Callable[[], Any], repeat: int = 1) -> Timing:
    """The best of several runs."""
    found = []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        found.append(Timing(time.perf_counter() - wall, time.process_time() - cpu))
    return Timing(min(t.wall for t in found), min(t.cpu for t in found))


class PlainLoop:
    """A Transformers model as it loads by itself. Logits only at the rows' ends, which most loops do not ask for."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval().to(device)
        self.config = self.model.config
        self._device = device

    @torch.inference_mode()
    def forward(self, rows: Sequence[Sequence[int]], everywhere: bool = False) -> torch.Tensor:
        """Log-probabilities [rows, vocabulary] after each row, one padded batch. `everywhere`: from logits at all."""
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self._device)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if any(len(row) < longest for row in rows):
            lengths = torch.tensor([len(row) for row in rows], device=self._device)
            inputs["attention_mask"] = (torch.arange(longest, device=self._device) < lengths[:, None]).long()
        ends = sorted({len(row) - 1 for row in rows})
        if everywhere:
            logits = self.model(**inputs).logits
            picked = torch.stack([logits[i, len(row) - 1] for i, row in enumerate(rows)])
            return picked.float().log_softmax(-1).cpu()
        logits = self.model(**inputs, logits_to_keep=torch.tensor(ends, device=self._device)).logits
        picked = torch.stack([logits[i, ends.index(len(row) - 1)] for i, row in enumerate(rows)])
        return picked.float().log_softmax(-1).cpu()


class PlainProcess:
    """A `PlainLoop` in a process of its own, which also measures what the machine can do.

    Two threads that compute, each with its OpenMP pool, would slow one another down even when one of them rests.
    """

    def __init__(self, checkpoint: Path, dtype: str, device: str) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _start, (checkpoint, dtype, device))

    def timed(self, rows: Sequence[Sequence[int]], repeat: int = 1, everywhere: bool = False) -> Timing:
        """The time of the loop over rows, in batches as they come."""
        return self._pool.submit(_timed, rows, repeat, everywhere).result()

    def matmul_rate(self) -> float:
        """See `limits.matmul_rate`."""
        return self._pool.submit(_matmul_rate).result()

    def bandwidth(self) -> float:
        """See `limits.bandwidth`."""
        return self._pool.submit(_bandwidth).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


_loop: PlainLoop  # of the process


def _start(checkpoint: Path, dtype: str, device: str) -> None:
    global _loop
    _loop = PlainLoop(checkpoint, getattr(torch, dtype), torch.device(device))


def _timed(rows: Sequence[Sequence[int]], repeat: int, everywhere: bool) -> Timing:
    return timed(lambda: [_loop.forward(rows[i : i + BATCH], everywhere) for i in range(0, len(rows), BATCH)], repeat)


def _matmul_rate() -> float:
    return limits.matmul_rate(_loop.config, _loop.model.dtype, _loop.model.device)


def _bandwidth() -> float:
    return limits.bandwidth(_loop.model.device)
