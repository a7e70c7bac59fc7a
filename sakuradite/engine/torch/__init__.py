"""Loading a checkpoint into the PyTorch backend. Importing this imports neither torch nor Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sakuradite.config import ModelConfig

if TYPE_CHECKING:
    from sakuradite.engine.backend import Backend


def load(config: ModelConfig, checkpoint: Path) -> Backend:
    """The backend of a checkpoint folder: weights on their device, a layout chosen, probed where it shares prefixes.

    Raises ConfigurationError or InsufficientResourcesError for a device that is not here or too small,
    UnsupportedModelError for what Transformers cannot load natively, ModelLoadFailedError for missing or broken files,
    MissingExtraError without torch and Transformers.
    """
    try:
        from sakuradite.engine.torch.assembly import assemble
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "transformers", "safetensors"):
            raise
        from sakuradite.errors import MissingExtraError

        raise MissingExtraError("the PyTorch backend", "torch") from error
    return assemble(config, checkpoint)
