"""Images from file to prompt: decoding, the processor's tokens and pixels, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sakuradite.engine import pictures
from sakuradite.engine.backend import Images
from sakuradite.engine.compile import Compiler
from sakuradite.engine.illustrated import Illustrator
from sakuradite.engine.pictures import Pictures, decode
from sakuradite.engine.plan import Plan
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.errors import MissingExtraError, UnsupportedModelError, ValidationError
from sakuradite.images import illustrated
from sakuradite.questions import Choice, Noul, question_record
from sakuradite.records import Candidate, QuestionRecord, RequestRecord, RowFailure
from tests.photographs import DAMAGED, TAKEN, file
from tests.picturing import PICTURED, SPECIAL_TOKENS
from tests.test_images import encoded, png, rotated

LEVELS = 14  # of 255, by which torchvision's resizing was seen to differ from Pillow's on these pictures
LATE = question_record(Noul(instructions="Late?"))


@pytest.fixture
def compiler(tiny: Callable[..., Path]) -> Callable[..., Compiler]:
    """`compiler("smolvlm", allowed=4096)`: compiles for a tiny checkpoint."""

    def make(architecture: str = "smolvlm", allowed: int = 4096) -> Compiler:
        tokenizer = FastTokenizer(tiny(architecture))
        return Compiler(
            tokenizer, "m", allowed, illustrator=Illustrator(tokenizer, Pictures(tiny(architecture), tokenizer))
        )

    return make


def compiled(compiler: Compiler, request: RequestRecord) -> Plan:
    (plan,) = compiler.compile([request])
    assert isinstance(plan, Plan), plan
    return plan


def test_a_phone_photo_is_turned_upright() -> None:
    """Case 35: stored 4 wide and 2 high, to be shown turned by 90 degrees."""
    picture = Image.new("RGB", (40, 20), "white")
    picture.paste("red", (0, 0, 20, 20))  # left half: it becomes the top
    found = decode(file(picture, "JPEG", exif=rotated(), quality=95), 0)
    assert found.size == (20, 40)
    top, bottom = found.getpixel((10, 5)), found.getpixel((10, 35))
    assert isinstance(top, tuple)
    assert isinstance(bottom, tuple)
    assert (top[0] > 200, top[1] < 60, bottom[1] > 200) == (True, True, True)
    assert decode(encoded("JPEG", (4, 2), exif=rotated()), 0).size == (2, 4)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_file_cut_short_is_named(kind: str, share: float) -> None:
    """Case 36; a PNG also where its last chunk is patched in again, so that the structure looks whole."""
    data = encoded(kind, (800, 600))
    cut = data[: int(len(data) * share)]
    for broken in (cut, cut + data[-12:])[: 2 if kind == "PNG" else 1]:
        with pytest.raises(ValidationError, match=r"images\[3\]") as caught:
            decode(broken, 3)
        assert caught.value.param == "images[3]"
        assert caught.value.detail[0].loc == ("body", "images", 3)


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_becomes_an_upright_rgb_picture(name: str) -> None:
    """Cases 35 and 39; of several pictures in a file the first."""
    data, size, last = TAKEN[name]
    found = decode(data, 0)
    assert (found.mode, found.size) == ("RGB", size)
    if last is not None:
        assert found.getpixel((size[0] - 1, size[1] - 1)) == pytest.approx(last, abs=3)


@pytest.mark.parametrize(
    ("data", "colour"),
    [
        pytest.param(file(Image.new("RGBA", (8, 8), (0, 0, 255, 0)), "PNG"), (255, 255, 255), id="RGBA"),
        pytest.param(file(Image.new("LA", (8, 8), (9, 255)), "PNG"), (9, 9, 9), id="grey and alpha"),
        pytest.param(file(Image.new("1", (8, 8), 1), "PNG"), (255, 255, 255), id="one bit"),
    ],
)
def test_other_colours_become_rgb(data: bytes, colour: tuple[int, ...]) -> None:
    assert decode(data, 0).getpixel((6, 4)) == colour


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_inside_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"images\[0\] cannot be decoded"):
        decode(DAMAGED[name], 0)


@pytest.mark.parametrize("size", [(40_000, 40_000), (12_000, 9_000)])
def test_a_decompression_bomb_is_refused_here_too(size: tuple[int, int]) -> None:
    """Case 40: warnings are errors in these tests, so Pillow's would show."""
    with pytest.raises(ValidationError, match=r"images\[0\]: .* megapixels"):
        decode(png(*size), 0)


@pytest.mark.parametrize("data", [b"", b"GIF89a" + bytes(40), png(8, 8)], ids=["nothing", "another type", "no pixels"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(ValidationError, match=r"images\[1\]"):
        decode(data, 1)


@pytest.mark.parametrize("architecture", PICTURED)
def test_pixels_and_tokens_are_those_of_the_complete_processor(architecture: str, tiny: Callable[..., Path]) -> None:
    """R11.8: prepared without the text, once for all questions."""
    tokenizer = FastTokenizer(tiny(architecture))
    prepared = Pictures(tiny(architecture), tokenizer)
    images = [decode(encoded("PNG", size), 0) for size in ((64, 48), (20, 90), (33, 33))]
    found = prepared.prepare((2, 0), images)
    shown = prepared.placeholder
    complete = prepared._call(f"one {shown} two {shown} three", [images[2], images[0]], add_special_tokens=False)
    for name, array in found.images.arrays.items():
        assert np.array_equal(array, complete[name])
    one, two = found.expansions
    ids = tokenizer.control([f"one {one} two {two} three"])[0]
    assert ids == complete["input_ids"][0].tolist()


def test_images_are_decoded_and_prepared_once(
    compiler: Callable[..., Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, prepared = [], []
    real, call = pictures.decode, Pictures._call
    chosen = compiler()

    def decoding(data: bytes, index: int) -> Image.Image:
        decoded.append(index)
        return real(data, index)

    def calling(self: Pictures, text: str, images: Any, **options: Any) -> Any:
        prepared.append(len(images))
        return call(self, text, images, **options)

    monkeypatch.setattr("sakuradite.engine.illustrated.decode", decoding)
    monkeypatch.setattr(Pictures, "_call", calling)
    one = QuestionRecord("choice", ("Like ", 1, "?"), (Candidate("a"), Candidate("b", ("so ", 1))))
    request = RequestRecord("r", (0, "text"), (LATE, one, LATE, one), (encoded("PNG"), encoded("JPEG")))
    plan = compiled(chosen, request)
    assert decoded == [0, 1]
    assert prepared == [1, 3]  # the state's image, and it with another shown twice
    sets = [question.prefix.extras["images"] for question in plan.questions]
    assert sets[0] is sets[2]
    assert sets[1] is sets[3]
    assert sets[0] is not sets[1]


def test_text_cannot_forge_an_image(compiler: Callable[..., Compiler]) -> None:
    plain, forged = (
        compiled(compiler(), RequestRecord("r", illustrated(text, 1), (LATE,), (encoded("PNG"),))).questions[0]
        for text in ("text", "<image> text <row_1_col_1> <|im_end|> \ue0001:")
    )
    control = range(len(SPECIAL_TOKENS))
    tokens = [[t for t in question.rows[0].suffix if t in control] for question in (plain, forged)]
    assert tokens[0] == tokens[1]


def test_images_in_a_question_stand_in_their_places(compiler: Callable[..., Compiler]) -> None:
    """And a question without one shares its prefix as text does."""
    one = QuestionRecord("choice", ("Which?",), (Candidate("a", (0,)), Candidate("b", ("or ", 1, " this"))))
    request = RequestRecord("r", ("state",), (LATE, one, LATE), (encoded("PNG"), encoded("PNG")))
    plan = compiled(compiler("llava"), request)
    questions = sorted(plan.questions, key=lambda question: question.index)
    assert questions[0].prefix is questions[2].prefix
    assert questions[0].prefix.tokens
    assert not questions[0].prefix.extras
    assert isinstance(questions[1].prefix.extras["images"], Images)
    row, image = list(questions[1].rows[0].suffix), 3  # <image>
    runs = "".join("i" if token == image else "t" for token in row)
    assert [len(run) for run in runs.split("t") if run] == [16, 16]


def test_a_turn_begins_with_the_images_of_the_state(compiler: Callable[..., Compiler]) -> None:
    question = compiled(
        compiler("llava"), RequestRecord("r", illustrated("", 2), (LATE,), (encoded("PNG"),) * 2)
    ).questions[0]
    suffix = question.rows[0].suffix
    start = suffix.index(3)
    assert suffix[start : start + 32] == (3,) * 32
    assert question.input_tokens == len(suffix)


def test_over_the_context_says_both_numbers_with_the_images_expanded(compiler: Callable[..., Compiler]) -> None:
    request = RequestRecord("r", illustrated("text", 2), (LATE,), (encoded("PNG", (90, 60)),) * 2)
    whole = compiled(compiler(), request).questions[0].input_tokens
    assert whole > 2 * 4 * 4  # tiles of four tokens each
    plan = compiled(compiler(allowed=whole - 1), request)
    (failure,) = plan.failures
    assert isinstance(failure, RowFailure)
    assert failure.error.code == "context_exceeded"
    assert f"needs {whole} tokens (its whole prompt, 2 images included); m allows {whole - 1}" in failure.error.message
    assert not compiled(compiler(allowed=whole), request).failures


def test_a_shape_that_the_processor_does_not_take_is_refused(compiler: Callable[..., Compiler]) -> None:
    (refused,) = compiler("qwen3_vl").compile(
        [RequestRecord("r", illustrated("", 1), (LATE,), (file(Image.new("RGB", (900, 2)), "PNG"),))]
    )
    assert isinstance(refused, ValidationError)
    assert "images[0] cannot be prepared for this model" in refused.message


def test_labels_of_two_tokens_are_complete_rows(compiler: Callable[..., Compiler]) -> None:
    many = question_record(Choice(criteria={str(i): None for i in range(60)}))
    (question,) = compiled(
        compiler("llava"), RequestRecord("r", illustrated("", 1), (many,), (encoded("PNG"),))
    ).questions
    assert len(question.labels.paths[0]) == 2
    assert len(question.rows) == len(question.labels.firsts)
    assert all(row.suffix[:-1] == question.rows[0].suffix[:-1] for row in question.rows)
    assert [len(row.reads) for row in question.rows] == [2] + [1] * (len(question.rows) - 1)
    assert question.rows[0].reads[0].offset == question.input_tokens - 1


@pytest.mark.parametrize(("missing", "architecture"), [("torchvision", "qwen3_vl"), ("torchvision", "lfm2_vl")])
def test_a_missing_package_is_said(
    missing: str, architecture: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoProcessor

    folder = tiny(architecture)

    def refusing(*args: Any, **options: Any) -> Any:
        raise ImportError(f"Could not import {missing}")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", refusing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf"{missing} not installed.*sakuradite\[torch\]"):
        Pictures(folder, FastTokenizer(folder))


ALONE = """
import sys
for name in ("torch", "torchvision", "num2words"):
    sys.modules[name] = None  # as where [mlx] is installed alone
import io, json
from pathlib import Path
import numpy as np
from sakuradite.engine.pictures import Pictures, decode
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.errors import MissingExtraError
folder, files, target = Path(sys.argv[1]), [Path(file) for file in sys.argv[3:]], Path(sys.argv[2])
try:
    pictures = Pictures(folder, FastTokenizer(folder))
except MissingExtraError as error:
    print(json.dumps(str(error)))
else:
    found = pictures.prepare(range(len(files)), [decode(file.read_bytes(), 0) for file in files])
    np.savez(target, **found.images.arrays)
    print(json.dumps(found.expansions))
"""
SIZES = ((64, 48), (20, 90), (33, 33), (300, 100))


def without_torch(folder: Path, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """What images of SIZES expand to, or the refusal, and their arrays, in a process without torch and torchvision."""
    files = []
    for i, size in enumerate(SIZES):
        files.append(tmp_path / f"{i}.png")
        files[-1].write_bytes(encoded("PNG", size))
    target = tmp_path / "arrays.npz"
    command = [sys.executable, "-c", ALONE, str(folder), str(target), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    arrays = dict(np.load(target)) if target.exists() else {}
    return json.loads(done.stdout.splitlines()[-1]), arrays


@pytest.mark.parametrize("architecture", ["smolvlm", "idefics3"])
def test_images_without_torchvision_are_those_of_the_complete_processor(
    architecture: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """R10.1 with [mlx] alone: the same tokens, and the pixels of Transformers' processor that resizes with Pillow."""
    from transformers import AutoImageProcessor, AutoProcessor

    folder = tiny(architecture)
    expansions, arrays = without_torch(folder, tmp_path)
    images = [decode(encoded("PNG", size), 0) for size in SIZES]
    complete = AutoProcessor.from_pretrained(folder)
    assert type(complete).__name__ == {"smolvlm": "SmolVLMProcessor", "idefics3": "Idefics3Processor"}[architecture]
    complete.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    shown = {"text": [complete.image_token * len(images)], "images": [images], "return_tensors": "np"}
    expected = complete(**shown, return_text_replacement_offsets=True)
    assert expansions == [place["replacement"] for place in expected["text_replacement_offsets"][0]]
    assert {name for name in expected if name.startswith("pixel")} == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(array, expected[name]), name
    resized = AutoProcessor.from_pretrained(folder)(**shown)["pixel_values"]  # with torchvision
    assert resized.shape == arrays["pixel_values"].shape
    assert np.abs(resized - arrays["pixel_values"]).max() <= LEVELS * 2 / 255 + 1e-6


def test_lfm2_vl_without_torchvision_names_what_to_install(tiny: Callable[..., Path], tmp_path: Path) -> None:
    said, arrays = without_torch(tiny("lfm2_vl"), tmp_path)
    assert "torchvision" in said
    assert "pip install 'sakuradite[torch]'" in said
    assert arrays == {}


def test_a_checkpoint_without_a_processor_is_refused(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="no image processor"):
        Pictures(folder, FastTokenizer(folder))
