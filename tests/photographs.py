"""Image files as they arrive: those that are taken, those refused from their header, those damaged inside."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from tests.test_images import encoded, jpeg, png, rotated


def file(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def palette() -> bytes:
    """Red on the left, a transparent colour on the right."""
    picture = Image.new("P", (8, 8), 0)
    picture.putpalette([0, 0, 0, 255, 0, 0])
    picture.paste(1, (0, 0, 4, 8))
    return file(picture, "PNG", transparency=0)


def two(kind: str) -> bytes:
    """A file of two pictures, the first of them red."""
    return file(Image.new("RGB", (8, 8), "red"), kind, save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")])


RED, WHITE = (255, 0, 0), (255, 255, 255)
TAKEN: dict[str, tuple[bytes, tuple[int, int], tuple[int, ...] | None]] = {
    "phone photo": (encoded("JPEG", (4, 2), exif=rotated()), (2, 4), None),
    "CMYK JPEG": (file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), (8, 8), RED),
    "palette with transparency": (palette(), (8, 8), WHITE),
    "16-bit PNG": (file(Image.fromarray(np.full((8, 8), 32896, np.uint16)), "PNG"), (8, 8), (128, 128, 128)),
    "animated PNG": (two("PNG"), (8, 8), RED),
    "JPEG of two pictures": (two("MPO"), (8, 8), RED),
}
"""The file, the size of the picture as the model sees it, and the colour of its last pixel where it is one."""

REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a JPEG or PNG file"),
    "animated GIF": (two("GIF"), "not a JPEG or PNG file"),
    "WEBP": (encoded("WEBP"), "not a JPEG or PNG file"),
    "half a JPEG": (encoded("JPEG", (800, 600))[: len(encoded("JPEG", (800, 600))) // 2], "the JPEG file is cut short"),
    "99 % of a JPEG": (encoded("JPEG", (800, 600))[:-400], "the JPEG file is cut short"),
    "half a PNG": (encoded("PNG", (800, 600))[:5000], "the PNG file is cut short"),
    "bomb": (png(40_000, 40_000), "40000 x 40000 pixels; at most 50 megapixels are taken"),
    "large PNG": (png(12_000, 9_000), "12000 x 9000 pixels; at most 50 megapixels are taken"),
    "large JPEG": (jpeg(65_535, 65_535), "65535 x 65535 pixels; at most 50 megapixels are taken"),
    "no pixels": (png(0, 5), "the header gives a size of zero"),
}
"""The file, and what is said of it."""


def _flipped() -> bytes:
    data = bytearray(encoded("PNG", (64, 48)))
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


def _exploding() -> bytes:
    """A PNG with a text chunk of 80 MB, compressed."""
    body = b"iTXt" + b"key\0\1\0\0\0" + zlib.compress(b"a" * (80 << 20))
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    whole = file(Image.new("L", (8, 8)), "PNG")
    return whole[:33] + chunk + whole[33:]


DAMAGED: dict[str, bytes] = {"flipped byte": _flipped(), "no pixel data": png(40, 30), "exploding text": _exploding()}
"""Files whose header and structure are right, and that no decoder can read."""
