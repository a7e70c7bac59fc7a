"""Bytes: what the weights, the keys and values of a token and a forward take, and what the machine has to give."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sakuradite.engine.backend import Layout, Prefix, Row

CACHE_SHARE = 0.25  # of the memory that is free after loading, for stores between batches, where nothing is configured
CPU_PASS_TOKENS = 2048  # a longer forward gains nothing on a CPU: its activations leave the caches
LOGIT_BYTES = 256 << 20  # logits of one forward
BLOCK_SCORES = 1_200_000  # attention scores computed at once (4.8 MB): measured best between 128 and 768 rows of 1,576
CGROUP = Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # parameters of glibc's mallopt


@dataclass(frozen=True, slots=True)
class Sizes:
    """The widths of a model that its memory depends on."""

    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    cache_bytes_per_token: int
    bytes_per_value: int

    def forward_bytes(self, tokens: int, reads: int, keys: int) -> int:
        """An upper bound of what one forward takes beside weights and stores.

        At the widest point of a layer: the residual and its normalised copy, queries, keys, values and attention's
        output in float32, two or three vectors of the MLP; one block of scores in float32 and in the dtype; logits
        of the read positions in the dtype and in float32.
        """
        width = 6 * self.hidden + 3 * self.intermediate
        scores = 2 * 4 * max(BLOCK_SCORES, 16 * self.heads * keys)
        logits = reads * self.vocabulary * (self.bytes_per_value + 8)
        return tokens * (width * self.bytes_per_value + 4 * 3 * self.hidden) + scores + logits

    def pass_reads(self) -> int:
        """Positions that one forward may read within LOGIT_BYTES."""
        return max(1, LOGIT_BYTES // (self.vocabulary * (self.bytes_per_value + 8)))


@dataclass(frozen=True, slots=True)
class Budget:
    """What one forward computes at most, to predict the bytes of a batch."""

    sizes: Sizes
    pass_tokens: int
    round_up: Callable[[int], int] = int
    """The size that a forward of so many tokens is filled up to."""

    def predict(self, rows: Sequence[tuple[Prefix, Row]], layout: Layout, head_tokens: int) -> int:
        """Bytes for scoring rows, weights aside: stores of their prefixes, and the largest forward.

        The largest forward has `pass_tokens`, or a whole row where that is longer and cannot be cut.
        """
        if not rows:
            return 0
        prefixes = {id(prefix): len(prefix.tokens) for prefix, _ in rows}
        whole = [len(prefix.tokens) + len(row.suffix) for prefix, row in rows]
        uncut = [len(row.suffix) for _, row in rows] if layout == "packed" else whole
        computed = sum(prefixes.values()) + sum(uncut) if layout == "packed" else max(whole) * len(rows)
        stored = 0 if layout == "padded" else sum(prefixes.values()) + head_tokens
        if layout == "cloned":
            stored += sum(whole)  # a copy for each row
        forward = self.sizes.forward_bytes(
            self.round_up(max(max(uncut), min(self.pass_tokens, computed))),
            min(self.sizes.pass_reads(), sum(len(row.reads) for _, row in rows)),
            max(whole),
        )
        return stored * self.sizes.cache_bytes_per_token + forward


def sizes(config: Any, dtype: torch.dtype) -> Sizes:
    """The sizes of a (text) configuration."""
    hidden = config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or hidden // heads
    layers = config.num_hidden_layers
    experts = getattr(config, "num_experts_per_tok", None) or 1
    intermediate = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    return Sizes(
        hidden=max(hidden, heads * head),
        intermediate=(intermediate or 4 * hidden) * experts,
        heads=heads,
        vocabulary=config.vocab_size,
        cache_bytes_per_token=2 * layers * kv_heads * head * dtype.itemsize,
        bytes_per_value=dtype.itemsize,
    )


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights, those in oneDNN's layout included, tied ones once."""
    from sakuradite.engine.torch.linear import PackedLinear

    plain = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    packed = sum(m.nbytes for m in model.modules() if isinstance(m, PackedLinear))
    return sum(plain.values()) + packed


def keep_heap() -> None:
    """Let the C library (glibc) keep freed memory for the next forward instead of handing it back at every turn.

    The activations of 32 questions on one state came anew from the system 475,000 pages at a time, which took 0.9 of 8
    CPU seconds. Tensors over 32 MB still go back at once, and `trim_heap` gives up all that is free.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest it takes
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(M_TOP_PAD, 256 << 20)  # address space, not memory: also keeps the heaps of threads, of 64 MB each


def trim_heap() -> None:
    """Hand freed memory back to the system, where the C library can: its heaps keep what lies between live blocks."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device: of the GPU, or of main memory within a container's limit."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return min(_available(), _container_rest())


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # macOS
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _container_rest() -> int:
    """What a cgroup (version 2) still allows; without one, no limit. Cached files count as free: they give way."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    used -= sum(int(counts.get(name, 0)) for name in ("inactive_file", "active_file"))
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
