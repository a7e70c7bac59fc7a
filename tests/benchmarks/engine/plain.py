"""The plain loop that people write today: Transformers, complete rows, right-padded batches of 16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

BATCH = 16


class PlainLoop:
    """A Transformers model as it loads by itself. Logits only at the rows' ends, which is kinder than most loops."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval().to(device)
        self.config = self.model.config
        self._device = device

    @torch.inference_mode()
    def forward(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Log-probabilities [rows, vocabulary] after each row, one padded batch."""
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self._device)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if any(len(row) < longest for row in rows):
            lengths = torch.tensor([len(row) for row in rows], device=self._device)
            inputs["attention_mask"] = (torch.arange(longest, device=self._device) < lengths[:, None]).long()
        ends = sorted({len(row) - 1 for row in rows})
        logits = self.model(**inputs, logits_to_keep=torch.tensor(ends, device=self._device)).logits
        picked = torch.stack([logits[i, ends.index(len(row) - 1)] for i, row in enumerate(rows)])
        return picked.float().log_softmax(-1).cpu()
