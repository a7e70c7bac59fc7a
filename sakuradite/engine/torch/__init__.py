"""Loading a checkpoint into the PyTorch backend. Importing this imports neither torch nor Transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sakuradite.config import ModelConfig

if TYPE_CHECKING:
    from sakuradite.engine.backend import Backend

SPIN_COUNT = "3000"  # turns of libgomp's loop. 300 gained nothing; 100,000 took up to 37 s in place of 3 on busy cores


def load(config: ModelConfig, checkpoint: Path) -> Backend:
    """The backend of a checkpoint folder: weights on their device, a layout chosen, probed where it shares prefixes.

    Raises ConfigurationError or InsufficientResourcesError for a device that is not here or too small,
    UnsupportedModelError for what Transformers cannot load natively, ModelLoadFailedError for missing or broken files,
    MissingExtraError without torch and Transformers.
    """
    # Idle OpenMP threads must sleep, not spin. Spinning keeps the thread that all wait for from its core whenever
    # another process wants one: a layer's attention on 2 busy cores took 3,700 ms spinning, 120 ms sleeping. But not at
    # once: waking one made a small operator take 47 microseconds that takes 3 otherwise, and 32 questions on one state
    # are some 20,000 operators. A moment's wait for the next one takes them from 5.0 s to 4.0 s. Read once, when torch
    # is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    try:
        from sakuradite.engine.torch.assembly import assemble
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "transformers", "safetensors"):
            raise
        from sakuradite.errors import MissingExtraError

        raise MissingExtraError("the PyTorch backend", "torch") from error
    return assemble(config, checkpoint)
