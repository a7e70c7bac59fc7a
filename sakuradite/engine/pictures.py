"""Images of a request: decoded once, then prepared by the checkpoint's own processor. Nothing outlives the request.

A processor does two things that a prompt needs: pixels as the model wants them, and the tokens that each image takes.
Both depend on the images alone, so all questions with the same images share them. That this holds for a checkpoint,
and that the tokens come out as its complete processor gives them, is proven on two made-up images when it is loaded.
"""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sakuradite.engine.backend import Images
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.errors import FieldProblem, MissingExtraError, UnsupportedModelError, ValidationError
from sakuradite.images import MAX_IMAGE_PIXELS, ImageError, check_image

if TYPE_CHECKING:
    from PIL.Image import Image

OF_THE_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
NEEDED_BY_SOME = ("torchvision", "num2words")  # packages that some processors need
PROBE_SIZES = ((90, 60), (30, 40))  # width, height of the made-up images
WHITE = (255, 255, 255, 255)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Images in the order in which a question shows them: per image the text it expands to, and all their pixels."""

    expansions: tuple[str, ...]
    images: Images


class Pictures:
    """The processor of one checkpoint.

    Raises MissingExtraError where it needs a package that is not installed, UnsupportedModelError where it cannot be
    loaded or its tokens do not come out as its own.
    """

    def __init__(self, checkpoint: Path, tokenizer: FastTokenizer) -> None:
        self._processor = _load(checkpoint)
        self.placeholder: str = getattr(self._processor, "image_token", None) or ""
        if not self.placeholder:
            raise UnsupportedModelError(f"its processor ({type(self._processor).__name__}) names no image token")
        self._prove(tokenizer)

    def prepare(self, shown: Sequence[int], decoded: Sequence[Image]) -> Prepared:
        """The images `shown`, by their index among the `decoded`, in order.

        Raises ValidationError where the processor does not take them (an image 300 times as wide as high, say).
        """
        text = self.placeholder * len(shown)
        try:
            found = self._call(text, [decoded[i] for i in shown], return_text_replacement_offsets=True)
        except ValueError as error:  # its messages tell sizes, nothing of the picture
            which = f"images[{shown[0]}]" if len(shown) == 1 else "the images"
            raise _invalid(shown[0], f"{which} cannot be prepared for this model: {error}") from None
        if "text_replacement_offsets" not in found:
            name = type(self._processor).__name__
            raise UnsupportedModelError(f"its processor ({name}) does not tell which tokens an image takes")
        (offsets,) = found["text_replacement_offsets"]
        arrays = {name: np.asarray(value) for name, value in found.items() if name not in OF_THE_TEXT}
        return Prepared(tuple(place["replacement"] for place in offsets), Images(arrays))

    def _call(self, text: str, images: Sequence[Image], **options: Any) -> Any:
        return self._processor(text=[text], images=[list(images)], return_tensors="np", **options)

    def _prove(self, tokenizer: FastTokenizer) -> None:
        """Compare with the complete processor on a whole prompt that shows two made-up images.

        Control tokens (turns, images, what stands around them) must come out alike, and the pixels be the same without
        the text. Ordinary tokens beside an image are left out: a tokenizer may put a space of its own there.
        """
        images = [_made_up(size) for size in PROBE_SIZES]
        texts = ("\nlook at this\n", "\nand at this\n", "")
        frame = tokenizer.turn((False, True, False, True), self.placeholder)
        complete = self._call(
            "".join(a + b for a, b in zip(frame, texts, strict=True)), images, add_special_tokens=False
        )
        ours = self.prepare(range(len(images)), images)
        expected = [token for token in complete["input_ids"][0].tolist() if token in tokenizer.forbidden]
        found: list[int] = []
        for ids in tokenizer.control(expanded(frame, self.placeholder, ours.expansions)):
            found += (token for token in ids if token in tokenizer.forbidden)
        name = type(self._processor).__name__
        if not tokenizer.forbidden.issuperset(self._processor.image_token_ids):
            raise UnsupportedModelError(f"its image token ({self.placeholder}) is an ordinary word of the tokenizer")
        if found != expected:
            raise UnsupportedModelError(f"the tokens of an image do not come out as its processor ({name}) gives them")
        arrays = {name: value for name, value in complete.items() if name not in OF_THE_TEXT}
        if arrays.keys() != ours.images.arrays.keys() or not all(
            np.array_equal(ours.images.arrays[name], value) for name, value in arrays.items()
        ):
            raise UnsupportedModelError(f"what its processor ({name}) makes of an image depends on the text beside it")


def decode(data: bytes, index: int) -> Image:
    """The upright RGB picture of a JPEG or PNG file, transparency on white.

    Raises ValidationError, naming `images[index]`, for a file that is damaged, cut short, too large or of another type.
    """
    from PIL import Image, ImageOps

    try:
        check_image(data)
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as opened:
            if opened.width * opened.height > MAX_IMAGE_PIXELS:
                raise ImageError(f"{opened.width} x {opened.height} pixels")
            opened.load()
            return _rgb(ImageOps.exif_transpose(opened))
    except ImageError as error:
        raise _invalid(index, f"images[{index}]: {error}") from None
    except Exception as error:  # Pillow's decoders raise nearly every class there is; their words may quote the file
        raise _invalid(index, f"images[{index}] cannot be decoded: damaged or cut short") from error


def expanded(texts: Sequence[str], placeholder: str, expansions: Sequence[str]) -> list[str]:
    """Texts of the frame with each placeholder replaced, in order, by what its image expands to."""
    given = iter(expansions)
    found = []
    for text in texts:
        first, *others = text.split(placeholder)
        found.append(first + "".join(next(given) + other for other in others))
    return found


def _rgb(image: Image) -> Image:
    """The picture in RGB. 16-bit grey is scaled, which Pillow would clip; transparency is laid on white."""
    from PIL import Image as Pillow

    if image.mode.startswith("I"):
        return Pillow.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        colours = image.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", colours.size, WHITE), colours).convert("RGB")
    return image.convert("RGB")


def _made_up(size: tuple[int, int]) -> Image:
    from PIL import Image

    return Image.linear_gradient("L").resize(size).convert("RGB")


def _load(checkpoint: Path) -> Any:
    try:
        processor = _processor(checkpoint)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error).lower()
        missing = [name for name in NEEDED_BY_SOME if name in said and importlib.util.find_spec(name) is None]
        if missing:
            raise MissingExtraError(f"its processor ({' and '.join(missing)} not installed)", "torch") from error
        raise UnsupportedModelError(f"its processor cannot be loaded: {error}") from error
    if not hasattr(processor, "image_processor"):
        raise UnsupportedModelError("it brings no image processor (processor_config.json or preprocessor_config.json)")
    return processor


def _processor(checkpoint: Path) -> Any:
    """The processor that Transformers has for the checkpoint.

    SmolVLM's needs torchvision and num2words, for videos alone. Without them Idefics3's takes its place, which makes
    the same of images; the tests compare the two.
    """
    from transformers import AutoProcessor, Idefics3Processor

    options = {"local_files_only": True, "trust_remote_code": False}
    config = checkpoint / "config.json"
    named = json.loads(config.read_text(encoding="utf-8")).get("model_type") if config.exists() else None
    if named == "smolvlm" and any(importlib.util.find_spec(name) is None for name in NEEDED_BY_SOME):
        return Idefics3Processor.from_pretrained(checkpoint, **options)
    return AutoProcessor.from_pretrained(checkpoint, **options)


def _invalid(index: int, message: str) -> ValidationError:
    problem = FieldProblem(("body", "images", index), message, "image_invalid")
    return ValidationError(message, param=f"images[{index}]", detail=(problem,))
