"""Images as they arrive: which ones are taken, checked from their header alone; nothing is decoded here.

Shared by the HTTP routes and the SDK. Decoding, orientation and colour belong to the model's worker.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sakuradite.records import Prose

MAX_IMAGES = 8  # of one request
MAX_IMAGE_BYTES = 20 << 20
MAX_IMAGE_PIXELS = 50_000_000

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_SIGNATURE = b"\xff\xd8\xff"
END_OF_JPEG = b"\xff\xd9"  # cannot occur inside compressed data, where every ff is followed by 00 or a restart marker
FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the segments that tell a JPEG's size
BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
START_OF_SCAN = 0xDA
MAX_SEGMENTS = 1 << 16  # of a file's structure; a crafted one could hold millions and keep the server busy

DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?:;[^;,]+)*?(?P<base64>;base64)?,", re.IGNORECASE)
MEDIA_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg"})


class ImageError(ValueError):
    """An image that is not taken. The message says why and holds nothing of the image."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the first bytes say: the format, and the size before any EXIF rotation."""

    format: Literal["png", "jpeg"]
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader:
    """The header of a whole JPEG or PNG file. Raises ImageError for another type or a file cut short."""
    if data.startswith(PNG_SIGNATURE):
        return _read_png(data)
    if data.startswith(JPEG_SIGNATURE):
        return _read_jpeg(data)
    raise ImageError("not a JPEG or PNG file")


def check_image(data: bytes) -> ImageHeader:
    """The header of an image within the limits. Raises ImageError naming the limit and the value."""
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageError(f"{len(data)} bytes; at most {MAX_IMAGE_BYTES} (20 MiB) are taken")
    header = read_header(data)
    if header.width * header.height > MAX_IMAGE_PIXELS:
        raise ImageError(
            f"{header.width} x {header.height} pixels; at most {MAX_IMAGE_PIXELS // 1_000_000} megapixels are taken"
        )
    if not header.width or not header.height:
        raise ImageError("the header gives a size of zero")
    return header


def from_base64(text: str) -> bytes:
    """The checked image of a base64 string. Raises ImageError."""
    if len(text) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        raise ImageError(f"about {len(text) * 3 // 4} bytes; at most {MAX_IMAGE_BYTES} (20 MiB) are taken")
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise ImageError("not valid base64") from None
    check_image(data)
    return data


def from_data_url(url: str) -> bytes:
    """The checked image of a base64 data URL. Raises ImageError; nothing is ever fetched."""
    match = DATA_URL.match(url, 0, 256)
    if match is None:
        scheme = "remote URLs are not fetched; " if url[:8].lower().startswith(("http:", "https:")) else ""
        raise ImageError(f"{scheme}send a base64 data URL: data:image/png;base64,…")
    if match["type"].lower() not in MEDIA_TYPES:
        raise ImageError("the data URL's type must be image/png or image/jpeg")
    if not match["base64"]:
        raise ImageError("the data URL must be base64: data:image/png;base64,…")
    return from_base64(url[match.end() :])


def to_data_url(data: bytes) -> str:
    """The data URL of an image, as the HTTP routes take it. Raises ImageError as `check_image` does."""
    return f"data:image/{check_image(data).format};base64,{base64.b64encode(data).decode()}"


def load_image(source: Path | bytes | str) -> bytes:
    """The checked file of a path, of bytes, or of a base64 data URL. Raises ImageError, or OSError for the path."""
    if isinstance(source, str):
        return from_data_url(source)
    if isinstance(source, Path):
        size = source.stat().st_size  # before reading: a wrong path may name something huge
        if size > MAX_IMAGE_BYTES:
            raise ImageError(f"{size} bytes; at most {MAX_IMAGE_BYTES} (20 MiB) are taken")
        source = source.read_bytes()
    check_image(source)
    return source


def illustrated(text: str, images: int) -> Prose:
    """A state with images that have no place in its text: all of them in order, then the text."""
    return (*range(images), text)


def _read_png(data: bytes) -> ImageHeader:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise ImageError("the PNG file is cut short or has no header")
    at = len(PNG_SIGNATURE)
    for _ in range(MAX_SEGMENTS):  # each chunk: length, name, data, checksum
        if data[at + 4 : at + 8] == b"IEND":
            return ImageHeader("png", int.from_bytes(data[16:20]), int.from_bytes(data[20:24]))
        at += 12 + int.from_bytes(data[at : at + 4])
        if at + 12 > len(data):
            raise ImageError("the PNG file is cut short")
    raise ImageError(f"the PNG file has over {MAX_SEGMENTS} chunks")


def _read_jpeg(data: bytes) -> ImageHeader:
    header = None
    at = 2
    for _ in range(MAX_SEGMENTS):
        if at + 4 > len(data):
            break
        if data[at] != 0xFF:
            raise ImageError("the JPEG file is damaged before its image data")
        marker = data[at + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
            continue
        if marker in BARE_MARKERS:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker in FRAME_MARKERS and at + 9 <= len(data):
            height, width = int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 7 : at + 9])
            header = ImageHeader("jpeg", width, height)
        if marker == START_OF_SCAN:
            if header is None:
                raise ImageError("the JPEG file has no size before its image data")
            if data.find(END_OF_JPEG, at) < 0:
                break
            return header
        at += 2 + length
    raise ImageError("the JPEG file is cut short")
