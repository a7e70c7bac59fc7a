"""The most memory that tensors take while something runs, as PyTorch's profiler sees its allocations."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The highest sum of allocations over frees on the CPU during `work`, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    taken = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    return most
