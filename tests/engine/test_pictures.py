"""Images from file to prompt: decoding, the processor's tokens and pixels, refusals."""

from __future__ import annotations

import io
import struct
import zlib
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
from tests.picturing import PICTURED, SPECIAL_TOKENS
from tests.test_images import encoded, png, rotated

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


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


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


def palette_with_transparency() -> bytes:
    picture = Image.new("P", (8, 8), 0)
    picture.putpalette([0, 0, 0, 255, 0, 0])
    picture.paste(1, (0, 0, 4, 8))
    return file(picture, transparency=0)


@pytest.mark.parametrize(
    ("data", "left", "right"),
    [
        pytest.param(file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), (254, 0, 0), (254, 0, 0), id="CMYK"),
        pytest.param(palette_with_transparency(), (255, 0, 0), (255, 255, 255), id="palette and transparency"),
        pytest.param(file(Image.new("RGBA", (8, 8), (0, 0, 255, 0))), (255, 255, 255), (255, 255, 255), id="RGBA"),
        pytest.param(file(Image.new("LA", (8, 8), (9, 255))), (9, 9, 9), (9, 9, 9), id="grey and alpha"),
        pytest.param(file(Image.new("1", (8, 8), 1)), (255, 255, 255), (255, 255, 255), id="one bit"),
        pytest.param(
            file(Image.fromarray(np.full((8, 8), 32896, np.uint16))), (128, 128, 128), (128, 128, 128), id="16 bits"
        ),
    ],
)
def test_other_colours_become_rgb(data: bytes, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Case 39."""
    found = decode(data, 0)
    assert found.mode == "RGB"
    for place, colour in (((1, 4), left), ((6, 4), right)):
        assert found.getpixel(place) == pytest.approx(colour, abs=3)


@pytest.mark.parametrize("size", [(40_000, 40_000), (12_000, 9_000)])
def test_a_decompression_bomb_is_refused_here_too(size: tuple[int, int]) -> None:
    """Case 40: warnings are errors in these tests, so Pillow's would show."""
    with pytest.raises(ValidationError, match=r"images\[0\]: .* megapixels"):
        decode(png(*size), 0)


@pytest.mark.parametrize("data", [b"", b"GIF89a" + bytes(40), png(8, 8)], ids=["nothing", "another type", "no pixels"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(ValidationError, match=r"images\[1\]"):
        decode(data, 1)


def test_a_text_chunk_that_explodes_is_refused() -> None:
    text = zlib.compress(b"a" * (80 << 20))
    body = b"iTXt" + b"key\0\1\0\0\0" + text
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    whole = file(Image.new("L", (8, 8)))
    with pytest.raises(ValidationError, match=r"images\[0\] cannot be decoded"):
        decode(whole[:33] + chunk + whole[33:], 0)


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
        [RequestRecord("r", illustrated("", 1), (LATE,), (file(Image.new("RGB", (900, 2))),))]
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


@pytest.mark.parametrize(
    ("missing", "architecture"), [("torchvision", "qwen3_vl"), ("torchvision", "lfm2_vl"), ("num2words", "smolvlm")]
)
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


def test_a_checkpoint_without_a_processor_is_refused(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="no image processor"):
        Pictures(folder, FastTokenizer(folder))
