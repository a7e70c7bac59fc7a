"""Images on PyTorch: whole requests against the plain processor and a plain forward, for every family."""

from __future__ import annotations

import asyncio
import gc
import io
import shutil
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Group
from sakuradite.engine.compile import Compiler
from sakuradite.engine.engine import Engine
from sakuradite.engine.illustrated import Illustrator
from sakuradite.engine.labels import LabelBook
from sakuradite.engine.loading import load
from sakuradite.engine.pictures import Pictures
from sakuradite.engine.prompt import WORDING, question_text
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.engine.torch import load as load_torch
from sakuradite.engine.torch import padded as padded_layout
from sakuradite.errors import UnsupportedModelError, ValidationError
from sakuradite.images import illustrated
from sakuradite.questions import Choice, Noul, question_record
from sakuradite.records import Outcome, QuestionRecord, RequestRecord, RowAnswer
from tests.picturing import PICTURED

QUESTIONS = (
    question_record(Noul(instructions="Is this urgent?")),
    question_record(Noul(instructions="Is this natural?")),  # as long as the first in characters and tokens
    question_record(Noul(instructions="Is this urgent? Answer yes or no.")),
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


async def asked(folder: Path, *requests: RequestRecord) -> list[list[Outcome]]:
    """The outcomes of requests, one after another, on an engine of their own."""
    config = ModelConfig(model="m", backend="torch", device="cpu", dtype="float32", num_cpus=1)
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


@cache
def reference(folder: Path) -> tuple[Any, Any]:
    """The processor and the model of a checkpoint as Transformers loads them."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoProcessor.from_pretrained(folder), model


@torch.inference_mode()
def by_processor(folder: Path, images: Sequence[bytes], question: QuestionRecord) -> tuple[list[float], int]:
    """Probabilities and prompt length by the complete processor, chat template included, and a plain forward."""
    tokenizer = FastTokenizer(folder)
    labels = LabelBook(tokenizer, "m").labels(question.kind, len(question.candidates))
    processor, model = reference(folder)
    head = WORDING.image_head if images else WORDING.head
    written = head + STATE + question_text(question, labels.codes)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": written}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    cue = processor.tokenizer.decode(labels.closing).removeprefix(tokenizer.frame.closing)
    shown = {"images": [[Image.open(io.BytesIO(data)).convert("RGB") for data in images]]} if images else {}
    inputs = processor(text=[text + cue], return_tensors="pt", add_special_tokens=False, **shown)
    after = model(**inputs).logits[0, -1].log_softmax(-1)
    return after[[path[0] for path in labels.paths]].softmax(-1).tolist(), inputs["input_ids"].shape[1]


def agree(folder: Path, images: Sequence[bytes], outcomes: Sequence[Outcome]) -> None:
    """Every outcome is what the reference gives, in float32."""
    assert len(outcomes) == len(QUESTIONS)
    for outcome, question in zip(outcomes, QUESTIONS, strict=True):
        assert isinstance(outcome, RowAnswer), outcome
        probabilities, length = by_processor(folder, images, question)
        assert outcome.input_tokens == length
        assert outcome.probabilities == pytest.approx(probabilities, abs=1e-5)


@pytest.mark.parametrize(
    ("architecture", "padded"),
    [*((name, False) for name in PICTURED), ("smolvlm", True), ("gemma3", True), ("qwen2_5_vl", True)],
)
async def test_images_are_answered_as_by_processor_and_forward(
    architecture: str, padded: bool, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several images; text-only requests between, which share prefixes where the model allows it."""
    if padded:  # as on a GPU, where rows of different lengths share a forward
        monkeypatch.setattr(padded_layout, "CPU_PADDING", 2.0)
    folder = tiny(architecture)
    other = (png((90, 60), 7), IMAGES[1])
    outcomes = await asked(folder, request(IMAGES), request(()), request(other), request(IMAGES[:1]), request(()))
    for outcome, images in zip(outcomes, (IMAGES, (), other, IMAGES[:1], ()), strict=True):
        agree(folder, images, outcome)
    for before, after in zip(outcomes[0], outcomes[2], strict=True):
        assert isinstance(before, RowAnswer)
        assert isinstance(after, RowAnswer)
        assert abs(before.probabilities[0] - after.probabilities[0]) > 1e-4  # another image, another probability


async def test_rows_with_images_and_without_share_a_batch(tiny: Callable[..., Path]) -> None:
    folder = tiny("smolvlm")
    asking = [request(IMAGES), request(()), request(IMAGES[1:])]
    config = ModelConfig(model="m", backend="torch", device="cpu", dtype="float32", max_batch_size=64)
    engine = Engine(config, folder, load=load)
    await engine.start()

    async def ask(one: RequestRecord) -> list[Outcome]:
        return sorted([o async for group in engine.decide(one) for o in group], key=lambda o: o.row)

    found = await asyncio.gather(*map(ask, asking))
    await engine.stop(drain=0)
    for one, outcomes in zip(asking, found, strict=True):
        agree(folder, one.images, outcomes)


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("smolvlm", "packed"),
        ("gemma3", "packed"),
        ("qwen3_5", "cloned"),
        ("lfm2_vl", "cloned"),
        ("qwen2_5_vl", "packed"),
    ],
)
def test_the_layout_of_text_only_requests(architecture: str, layout: str, tiny: Callable[..., Path]) -> None:
    backend = load_torch(ModelConfig(model="m", device="cpu", dtype="float32"), tiny(architecture))
    assert backend.facts.layout == layout, backend.facts.layout_reason


@pytest.mark.parametrize("architecture", PICTURED)
def test_the_vision_tower_sees_a_request_once(
    architecture: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many questions; and nothing of the images is left when their prefixes are released."""
    folder = tiny(architecture)
    tokenizer = FastTokenizer(folder)
    compiler = Compiler(tokenizer, "m", 4096, illustrator=Illustrator(tokenizer, Pictures(folder, tokenizer)))
    backend: Any = load_torch(ModelConfig(model="m", device="cpu", dtype="float32"), folder)
    seen: list[int] = []
    features = backend._model.get_image_features

    def counted(**given: Any) -> Any:
        seen.append(1)
        return features(**given)

    monkeypatch.setattr(backend._model, "get_image_features", counted)
    (plan,) = compiler.compile([request(IMAGES)])
    assert not isinstance(plan, Exception)
    images = {id(question.prefix.extras["images"]): question.prefix.extras["images"] for question in plan.questions}
    assert len(images) == 1
    groups = [Group(question.prefix, question.rows) for question in plan.questions]
    backend.score(groups)
    backend.score(groups[:1])
    assert len(seen) == 1
    kept = weakref.ref(next(iter(images.values())))
    for question in plan.questions:
        backend.release(question.prefix)
    del images, plan, groups, question
    gc.collect()
    assert kept() is None


async def test_a_damaged_image_fails_the_request_before_any_answer(tiny: Callable[..., Path]) -> None:
    """Case 36, and the next request is fine; R4.2: nothing of it reached the model."""
    engine = Engine(ModelConfig(model="m", backend="torch", device="cpu", num_cpus=1), tiny("idefics3"), load=load)
    await engine.start()
    damaged = IMAGES[0][:-60] + bytes(40) + IMAGES[0][-20:]
    groups = engine.decide(request((IMAGES[1], damaged)))
    with pytest.raises(ValidationError, match=r"images\[1\]") as caught:
        await anext(groups)
    assert caught.value.param == "images[1]"
    found = [outcome async for group in engine.decide(request(IMAGES[1:])) for outcome in group]
    assert {type(outcome) for outcome in found} == {RowAnswer}
    assert engine.pending_bytes == engine.pending_tokens == 0
    await engine.stop(drain=0)


async def test_a_processor_that_is_not_to_be_had_refuses_images_and_answers_text(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny("idefics3"), tmp_path / "bare"))
    (folder / "processor_config.json").unlink()
    engine = Engine(ModelConfig(model="m", backend="torch", device="cpu", num_cpus=1), folder, load=load)
    found = await engine.start()
    assert found.modalities == ("text",)
    assert any(note.startswith("images are refused: ") for note in found.warnings)
    with pytest.raises(UnsupportedModelError, match=r"images not supported by m: .*processor"):
        await anext(engine.decide(request(IMAGES)))
    assert len([o async for group in engine.decide(request(())) for o in group]) == len(QUESTIONS)
    await engine.stop(drain=0)


async def test_a_crowd_with_images_is_prepared_bit_by_bit(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels of waiting requests are bounded; text passes by, and everybody is answered."""
    monkeypatch.setattr("sakuradite.engine.worker.PREPARED_BYTES", 1)
    engine = Engine(ModelConfig(model="m", backend="torch", device="cpu", num_cpus=1), tiny("idefics3"), load=load)
    await engine.start()
    most = 0
    add = engine._worker._queue.add

    def counted(job: Any, questions: Any) -> None:
        nonlocal most
        add(job, questions)
        most = max(most, len({id(j) for j in engine._jobs if j.pixels}))

    monkeypatch.setattr(engine._worker._queue, "add", counted)

    async def ask(one: RequestRecord) -> int:
        return len([o async for group in engine.decide(one) for o in group])

    found = await asyncio.gather(*(ask(request(IMAGES if i % 2 else ())) for i in range(12)))
    assert found == [len(QUESTIONS)] * 12
    assert most == 1
    assert engine._worker.pixels == 0
    await engine.stop(drain=0)
