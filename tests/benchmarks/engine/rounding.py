"""How far bfloat16 rounding moves a probability: by reuse, by company, and by itself.

    python -m tests.benchmarks.engine.rounding [--requests 6]

Per tiny architecture the largest difference of a probability, over requests of states of 4 to 100 tokens with 5
questions each: reuse against a plain full forward in bfloat16; the same question alone against among 46 others; and,
to compare with, the plain forward in bfloat16 against the one in float32. Probabilities of tiny random models are flat,
so the differences are also given as parts of the probability.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.checkpoints import ARCHITECTURES, build
from tests.engine.torch.prompts import difference, group, loaded, plain, probabilities
from tests.engine.torch.test_company import HEAD, alone_and_in_company


def main() -> None:
    """One line per architecture, and the largest of all."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--requests", type=int, default=6)
    count = cli.parse_args().requests
    torch.set_grad_enabled(False)
    most = np.zeros(4)
    print(f"{'architecture':20} {'layout':8} {'reuse':>9} {'relative':>9} {'company':>9} {'bf16-f32':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name in ARCHITECTURES:
            checkpoint = build(name, Path(folder) / name)
            found = measure(checkpoint, count)
            most = np.maximum(most, found[1])
            print(f"{name:20} {found[0]:8} " + " ".join(f"{value:9.2g}" for value in found[1]), flush=True)
    print(f"{'largest':29} " + " ".join(f"{value:9.2g}" for value in most))


def measure(checkpoint: Path, count: int) -> tuple[str, np.ndarray]:
    """The layout, and: reuse, reuse as a part of the probability, company, the dtype itself."""
    backend = loaded(checkpoint, "bfloat16")
    backend.set_head(HEAD)
    reuse = relative = own = 0.0
    for seed in range(count):
        asked = group(100 + seed, 4 + 96 * seed // max(1, count - 1), (3, 21, 1, 8, 40), HEAD)
        answered, expected = probabilities(backend, asked)[0], plain(checkpoint, "bfloat16", asked)
        reuse = max(reuse, difference(answered, expected))
        relative = max(relative, float((np.abs(answered - expected) / expected).max()))
        own = max(own, difference(expected, plain(checkpoint, "float32", asked)))
    company = difference(*alone_and_in_company(checkpoint, "bfloat16"))
    return backend.facts.layout, np.array([reuse, relative, company, own])


if __name__ == "__main__":
    main()
