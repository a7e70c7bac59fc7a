"""Images on MLX: answers as PyTorch's on the same prepared images, the vision tower once per request."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Group, Images, Prefix, RowScores
from sakuradite.engine.engine import Engine
from sakuradite.engine.mlx import load
from sakuradite.engine.mlx.families import FAMILIES
from sakuradite.errors import ContextExceededError, MissingExtraError, UnsupportedModelError
from sakuradite.images import illustrated
from sakuradite.questions import Choice, Noul, question_record
from sakuradite.records import RequestRecord, RowAnswer
from tests.engine.mlx.tiny import IMAGE_TOKEN, Reference, float32, row, tokens
from tests.test_images import encoded

mx = pytest.importorskip("mlx.core", reason="needs the extra [mlx]")

VISION = sorted(name for name, family in FAMILIES.items() if family.images)
VOCABULARY = 439
LATE = question_record(Noul(instructions="Is this urgent?"))
TEAM = question_record(Choice(instructions="Which team?", criteria={"billing": "invoices", "shipping": None}))
type Family = Callable[[str], Path]


def images(model_type: str, seed: int = 0) -> tuple[dict[str, NDArray[Any]], tuple[int, ...]]:
    """Two prepared images and a prefix that shows them, padded as the processors do it."""
    draw = np.random.default_rng(seed)
    if model_type == "lfm2_vl":
        shapes = np.array([[4, 6], [8, 8]])
        mask = np.stack([np.arange(64) < h * w for h, w in shapes]).astype(np.int64)
        pixels = draw.normal(size=(2, 64, 48)).astype(np.float32) * mask[..., None].astype(np.float32)
        arrays = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}
        counts = (6, 16)
    else:
        side = 28 if model_type == "idefics3" else 56  # grids of 4 and of 14 patches a side
        mask = np.ones((1, 3, side, side), dtype=bool)
        mask[0, 2] = False
        pixels = draw.normal(size=(1, 3, 3, side, side)).astype(np.float32) * mask[:, :, None]
        arrays = {"pixel_values": pixels, "pixel_attention_mask": mask}
        counts = (4, 4) if model_type == "idefics3" else (49, 49)
    shown = [(IMAGE_TOKEN,) * count for count in counts]
    return arrays, (*tokens(5), *shown[0], 20, *shown[1], *tokens(9, seed=4))


def probabilities(scores: RowScores | Exception) -> list[NDArray[np.float32]]:
    assert isinstance(scores, tuple), scores
    return [np.exp(logs) for logs in scores]


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("model_type", VISION)
def test_images_are_answered_as_by_pytorch(model_type: str, long: bool, family: Family) -> None:
    from sakuradite.engine.mlx.vision import PREFILL_TOKENS

    folder = family(model_type)
    backend = load(float32(folder), folder)
    assert backend.facts.modalities == ("text", "image")
    arrays, shown = images(model_type)
    prefix = (*shown, *tokens(PREFILL_TOKENS if long else 10, seed=5))
    rows = [row(tokens(n, seed=n), 0, -1, vocabulary=VOCABULARY) for n in (3, 30)]
    shared = Images(arrays)
    reference = Reference(folder)
    for one in rows:  # a prefix for each row, the images shared: as a request's questions come
        group = Group(Prefix(prefix, extras={"images": shared}), [one])
        ((scores,),) = backend.score([group])
        expected = reference.with_images(prefix + one.suffix, arrays)
        for read, found in zip(one.reads, probabilities(scores), strict=True):
            assert np.abs(found - expected[len(prefix) + read.offset]).max() < 1e-4
        backend.release(group.prefix)
        assert group.prefix.extras == {}


@pytest.mark.parametrize("model_type", VISION)
def test_another_image_gives_another_answer(model_type: str, family: Family) -> None:
    folder = family(model_type)
    backend = load(float32(folder), folder)
    one = row(tokens(8), vocabulary=VOCABULARY)
    answers = []
    for seed in (0, 1):
        arrays, prefix = images(model_type, seed)
        ((scores,),) = backend.score([Group(Prefix(prefix, extras={"images": Images(arrays)}), [one])])
        answers += probabilities(scores)
    assert np.abs(answers[0] - answers[1]).max() > 1e-3


@pytest.mark.parametrize("model_type", VISION)
def test_the_vision_tower_sees_a_request_once(model_type: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family(model_type)
    backend: Any = load(float32(folder), folder)
    tower = type(backend._model.vision_tower if model_type == "lfm2_vl" else backend._model.vision_model)
    calls: list[int] = []
    whole = tower.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(tower, "__call__", counted)
    arrays, prefix = images(model_type)
    rows = [row(tokens(n, seed=n), vocabulary=VOCABULARY) for n in (3, 30)]
    shared = Images(arrays)
    first = backend.score([Group(Prefix(prefix, extras={"images": shared}), rows)])
    again = backend.score([Group(Prefix(prefix, extras={"images": shared}), rows)])
    assert len(calls) == 1
    for ours, theirs in zip(first[0], again[0], strict=True):
        assert np.array_equal(probabilities(ours), probabilities(theirs))
    backend.score([Group(Prefix(prefix, extras={"images": Images(arrays)}), rows)])  # another request
    assert len(calls) == 2


@pytest.mark.parametrize(("dtype", "length", "calls"), [("float32", 400, 1), ("float32", 600, 2), ("bfloat16", 600, 1)])
@pytest.mark.parametrize("model_type", VISION)
def test_long_inputs_fill_the_language_cache_in_float32(
    model_type: str, dtype: Any, length: int, calls: int, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11.9: 512 processed tokens or more, those of the images counted; what came first is not computed again."""
    folder = family(model_type)
    backend: Any = load(float32(folder, dtype=dtype), folder)
    arrays, prefix = images(model_type)
    one = row(tokens(length - len(prefix)), vocabulary=VOCABULARY)
    lengths: list[int] = []
    whole = type(backend._language).__call__

    def counted(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(inputs.shape[1])
        return whole(self, inputs, *args, **kwargs)

    monkeypatch.setattr(type(backend._language), "__call__", counted)
    backend.score([Group(Prefix(prefix, extras={"images": Images(arrays)}), [one])])
    assert (len(lengths), sum(lengths)) == (calls, length)


def test_half_precision_is_one_forward_near_float32(family: Family) -> None:
    folder = family("smolvlm")
    arrays, prefix = images("smolvlm")
    one = row(tokens(600), vocabulary=VOCABULARY)
    found = []
    for dtype in ("float32", "bfloat16"):
        backend: Any = load(float32(folder, dtype=dtype), folder)
        assert backend.facts.dtype == dtype
        ((scores,),) = backend.score([Group(Prefix(prefix, extras={"images": Images(arrays)}), [one])])
        found += probabilities(scores)
    assert np.abs(found[0] - found[1]).max() < 0.1


def test_a_row_over_the_context_fails_alone(family: Family) -> None:
    folder = family("smolvlm")
    backend = load(float32(folder), folder)
    rows = [row(tokens(n), vocabulary=VOCABULARY) for n in (5, 4097)]
    ((good, long),) = backend.score([Group(Prefix(()), rows)])
    assert isinstance(good, tuple)
    assert isinstance(long, ContextExceededError)


def test_images_that_mlx_vlm_would_misread_are_refused(family: Family) -> None:
    folder = family("smolvlm")
    backend = load(float32(folder), folder)
    arrays, prefix = images("smolvlm")
    padded = arrays | {"pixel_attention_mask": arrays["pixel_attention_mask"].copy()}
    padded["pixel_attention_mask"][0, 1, :, 14:] = False
    small = {name: array[..., :28, :28] for name, array in arrays.items()}
    one = row(tokens(8), vocabulary=VOCABULARY)
    for wrong, reason in ((padded, "padding inside"), (small, "prepared as 28x28 .* are 56x56")):
        ((scores,),) = backend.score([Group(Prefix(prefix, extras={"images": Images(wrong)}), [one])])
        assert isinstance(scores, UnsupportedModelError)
        assert re.search(reason, str(scores))


def test_image_tokens_without_as_many_features_are_an_error(family: Family) -> None:
    folder = family("smolvlm")
    backend = load(float32(folder), folder)
    arrays, prefix = images("smolvlm")
    group = Group(Prefix((*prefix, IMAGE_TOKEN), extras={"images": Images(arrays)}), [row((5,), vocabulary=VOCABULARY)])
    with pytest.raises(ValueError, match="do not match"):
        backend.score([group])


def test_loading_leaves_transformers_as_it_was(family: Family) -> None:
    """mlx-vlm's models replace `AutoProcessor.from_pretrained` by one that trusts a checkpoint's own code."""
    import os

    from transformers import AutoProcessor, Lfm2VlProcessor

    before = AutoProcessor.__dict__["from_pretrained"], Lfm2VlProcessor.__dict__["__call__"]
    for name in ("idefics3", "lfm2_vl"):
        load(float32(family(name)), family(name))
    assert (AutoProcessor.__dict__["from_pretrained"], Lfm2VlProcessor.__dict__["__call__"]) == before
    assert Lfm2VlProcessor.__call__.__module__.startswith("transformers.")
    assert Lfm2VlProcessor.__init__.__module__.startswith("transformers.")
    assert "from_pretrained" not in vars(Lfm2VlProcessor)
    assert "TRANSFORMERS_VERBOSITY" not in os.environ


def test_a_missing_mlx_vlm_is_said(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    from sakuradite.engine.mlx import check, runtime

    found = runtime.installed
    monkeypatch.setattr(runtime, "installed", lambda name: None if name == "mlx-vlm" else found(name))
    folder = family("idefics3")
    for refuse in (check, lambda folder: load(float32(folder), folder)):
        with pytest.raises(MissingExtraError, match=r"sakuradite\[mlx\]"):
            refuse(folder)
    check(family("qwen3_5"))  # the text part alone, which mlx-lm loads


def test_other_image_families_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(UnsupportedModelError, match="on MLX only SmolVLM, Idefics3 and LFM2-VL read images"):
        load(float32(tmp_path), tmp_path)


@pytest.mark.parametrize("model_type", VISION)
async def test_a_request_with_images_is_answered_as_by_pytorch(model_type: str, tiny: Callable[..., Path]) -> None:
    """From files to answers, through the same engine, processor and template; text alone too."""
    folder, found = tiny(model_type), {}
    requests = [
        RequestRecord("r", illustrated("Charged twice.", count), (LATE, TEAM), (encoded("PNG", (90, 60)),) * count)
        for count in (2, 0, 1)
    ]
    for backend in ("mlx", "torch"):
        config = ModelConfig.model_validate({"model": "m", "backend": backend, "device": "cpu", "dtype": "float32"})
        engine = Engine(config, folder)
        assert (await engine.start()).modalities == ("text", "image")
        found[backend] = [
            outcome
            for request in requests
            for outcome in sorted([o async for some in engine.decide(request) for o in some], key=lambda o: o.row)
        ]
        await engine.stop(drain=0)
    for ours, theirs in zip(found["mlx"], found["torch"], strict=True):
        assert isinstance(ours, RowAnswer), ours
        assert isinstance(theirs, RowAnswer), theirs
        assert ours.input_tokens == theirs.input_tokens
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-4)


ALONE = """
import asyncio, sys
for name in ("torch", "torchvision", "num2words"):
    sys.modules[name] = None  # as where [mlx] is installed alone
from pathlib import Path
from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.images import illustrated
from sakuradite.questions import Noul, question_record
from sakuradite.records import RequestRecord

async def main():
    engine = Engine(ModelConfig(model="m", dtype="float32", device="cpu"), Path(sys.argv[1]))
    print((await engine.start()).backend)
    late = question_record(Noul(instructions="Is this urgent?"))
    for files in ((), (Path(sys.argv[2]).read_bytes(),)):
        request = RequestRecord("r", illustrated("Charged twice.", len(files)), (late,), files)
        (answer,) = [o async for some in engine.decide(request) for o in some]
        print(answer.probabilities[0])
    await engine.stop(drain=0)

asyncio.run(main())
"""


def test_images_are_read_where_mlx_is_installed_alone(tiny: Callable[..., Path], tmp_path: Path) -> None:
    (picture := tmp_path / "picture.png").write_bytes(encoded("PNG", (90, 60)))
    command = [sys.executable, "-c", ALONE, str(tiny("smolvlm")), str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    backend, blind, seen = done.stdout.split()
    assert backend == "mlx"
    assert abs(float(blind) - float(seen)) > 1e-4
