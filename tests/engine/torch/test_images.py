"""Images on PyTorch: whole requests against the plain processor and a plain forward, for every family."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.engine.labels import LabelBook
from sakuradite.engine.loading import load
from sakuradite.engine.prompt import WORDING, question_text
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.images import illustrated
from sakuradite.questions import Choice, Noul, question_record
from sakuradite.records import Outcome, QuestionRecord, RequestRecord, RowAnswer
from tests.picturing import PICTURED

QUESTIONS = (
    question_record(Noul(instructions="Is this urgent?")),
    question_record(Choice(instructions="Which team?", criteria={"billing": "invoices", "shipping": None})),
)
STATE = "The customer was charged twice."


def png(size: tuple[int, int], seed: int = 0) -> bytes:
    """A PNG of coarse noise, which survives being made small."""
    draw = np.random.default_rng(seed)
    picture = Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(size)
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


IMAGES = (png((90, 60)), png((30, 40), 1))


async def asked(folder: Path, *requests: RequestRecord, **settings: Any) -> list[list[Outcome]]:
    """The outcomes of requests, one after another, on an engine of their own."""
    config = ModelConfig(model="m", **({"backend": "torch", "device": "cpu", "dtype": "float32"} | settings))
    engine = Engine(config, folder, load=load)
    found = await engine.start()
    assert found.modalities == ("text", "image"), found.warnings
    outcomes = []
    for request in requests:
        got = [o async for group in engine.decide(request) for o in group]
        outcomes.append(sorted(got, key=lambda outcome: outcome.row))
    await engine.stop(drain=0)
    return outcomes


def request(images: Sequence[bytes], state: str = STATE) -> RequestRecord:
    return RequestRecord("r", illustrated(state, len(images)), QUESTIONS, tuple(images))


@torch.inference_mode()
def by_processor(folder: Path, images: Sequence[bytes], question: QuestionRecord) -> tuple[list[float], int]:
    """Probabilities and prompt length by the complete processor, chat template included, and a plain forward."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    tokenizer = FastTokenizer(folder)
    labels = LabelBook(tokenizer, "m").labels(question.kind, len(question.candidates))
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    written = WORDING.image_head + STATE + question_text(question, labels.codes)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": written}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    cue = processor.tokenizer.decode(labels.closing).removeprefix(tokenizer.frame.closing)
    pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
    inputs = processor(text=[text + cue], images=[pictures], return_tensors="pt", add_special_tokens=False)
    after = model(**inputs).logits[0, -1].log_softmax(-1)
    return after[[path[0] for path in labels.paths]].softmax(-1).tolist(), inputs["input_ids"].shape[1]


@pytest.mark.parametrize("architecture", PICTURED)
async def test_images_are_answered_as_by_processor_and_forward(architecture: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(architecture)
    both, other = await asked(folder, request(IMAGES), request((png((90, 60), 7), IMAGES[1])))
    for outcome, question in zip(both, QUESTIONS, strict=True):
        assert isinstance(outcome, RowAnswer), outcome
        probabilities, length = by_processor(folder, IMAGES, question)
        assert outcome.input_tokens == length
        assert outcome.probabilities == pytest.approx(probabilities, abs=1e-5)
    for before, after in zip(both, other, strict=True):
        assert isinstance(before, RowAnswer)
        assert isinstance(after, RowAnswer)
        assert abs(before.probabilities[0] - after.probabilities[0]) > 1e-4  # another image, another probability
