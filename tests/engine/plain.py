"""The reference: a plain Transformers forward of every row's whole tokens, one at a time, as a backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Backend, Group, ModelFacts, Prefix, RowScores
from sakuradite.engine.tokenizer import FastTokenizer, Tokenizer


class PlainBackend:
    """A checkpoint in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        self.facts = ModelFacts(
            architecture=type(self.model).__name__,
            device="cpu",
            dtype="float32",
            context_length=config.max_position_embeddings,
            vocabulary_size=config.vocab_size,
            parameters=0,
            weight_bytes=0,
            layout="padded",
            layout_reason="the reference",
        )

    def set_head(self, tokens: Sequence[int]) -> None:
        pass

    def log_probabilities(self, tokens: Sequence[int]) -> Any:
        """After each token, log-probabilities of the next over the vocabulary."""
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)

    def score(self, groups: Sequence[Group]) -> list[list[RowScores | Exception]]:
        found: list[list[RowScores | Exception]] = []
        for group in groups:
            found.append([])
            for row in group.rows:
                logs = self.log_probabilities(group.prefix.tokens + row.suffix).numpy()
                start = len(group.prefix.tokens)
                found[-1].append(
                    tuple(np.array([logs[start + r.offset, t] for t in r.tokens], np.float32) for r in row.reads)
                )
        return found

    def release(self, prefix: Prefix) -> None:
        pass

    def close(self) -> None:
        pass


def load_plain(config: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer, Backend]:
    """A loader of the reference."""
    assert checkpoint is not None
    return FastTokenizer(checkpoint), PlainBackend(checkpoint)
