"""Which images are taken, judged from their header alone."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from sakuradite.images import (
    ImageError,
    ImageHeader,
    check_image,
    from_data_url,
    illustrated,
    load_image,
    read_header,
    to_data_url,
)


def picture(format: str, size: tuple[int, int] = (8, 6), mode: str = "RGB", **options: object) -> bytes:
    """A small file as Pillow writes it."""
    out = io.BytesIO()
    Image.new(mode, size).save(out, format, **options)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it has this size and holds nothing."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg(mode: str, progressive: bool) -> None:
    data = picture("JPEG", (800, 600), mode, progressive=progressive, comment=b"x" * 300)
    assert read_header(data) == ImageHeader("jpeg", 800, 600)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "1", "I;16"])
def test_png(mode: str) -> None:
    assert read_header(picture("PNG", (7, 5), mode)) == ImageHeader("png", 7, 5)


def test_a_jpeg_with_exif_and_a_thumbnail_inside() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x9286] = picture("JPEG", (160, 120)).decode("latin-1")
    assert read_header(picture("JPEG", (4, 2), exif=exif)) == ImageHeader("jpeg", 4, 2)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.5, 0.99])
def test_a_file_cut_short_is_refused(format: str, share: float) -> None:
    noise = Image.effect_noise((800, 600), 60)
    out = io.BytesIO()
    noise.save(out, format)
    data = out.getvalue()
    check_image(data)
    with pytest.raises(ImageError):
        check_image(data[: int(len(data) * share)])


@pytest.mark.parametrize("format", ["GIF", "WEBP", "BMP", "TIFF"])
def test_other_types_are_refused(format: str) -> None:
    with pytest.raises(ImageError, match="not a JPEG or PNG"):
        check_image(picture(format))


def test_size_is_judged_from_the_header() -> None:
    for width, height in ((40_000, 40_000), (12_000, 9_000), (50_000_001, 1)):
        with pytest.raises(ImageError, match="50 megapixels"):
            check_image(png_header(width, height))
    check_image(png_header(10_000, 5_000))
    with pytest.raises(ImageError, match="zero"):
        check_image(png_header(0, 5))
    with pytest.raises(ImageError, match="20971520"):
        check_image(png_header(1, 1) + bytes(20 << 20))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"\xff\xd8" + b"\xff" * 100_000,
        b"\xff\xd8\xff\xda\x00\x02\xff\xd9",
        b"\xff\xd8\xff\xe0\x00\x00" * 100_000,
        b"\xff\xd8\xff\x01\x00\x00",
        b"\x89PNG\r\n\x1a\n" + bytes(40),
        png_header(1, 1)[:33] + (b"\x00\x00\x00\x00tEXt\x00\x00\x00\x00" * 100_000),
    ],
)
def test_crafted_files_are_refused(data: bytes) -> None:
    with pytest.raises(ImageError):
        check_image(data)


def test_data_urls() -> None:
    png = picture("PNG")
    text = base64.b64encode(png).decode()
    for head in ("data:image/png;base64,", "DATA:IMAGE/JPEG;BASE64,", "data:image/jpg;name=x;base64,"):
        assert from_data_url(head + text) == png
    assert from_data_url(to_data_url(png)) == png
    assert to_data_url(picture("JPEG")).startswith("data:image/jpeg;base64,")
    for url, words in (
        ("http://example.org/x.png", "not fetched"),
        ("HTTPS://example.org/x.png", "not fetched"),
        ("/etc/passwd", "data URL"),
        ("file:///etc/passwd", "data URL"),
        ("", "data URL"),
        (f"data:image/gif;base64,{text}", "image/png"),
        (f"data:;base64,{text}", "image/png"),
        (f"data:image/png,{text}", "base64"),
        ("data:image/png;base64,", "not a JPEG"),
        (f"data:image/png;base64,{text}!", "base64"),
        (f"data:image/png;base64, {text}", "base64"),
        ("data:image/png;base64,é", "base64"),
        ("data:image/png;base64," + "A" * (28 << 20), "20 MiB"),
    ):
        with pytest.raises(ImageError, match=words):
            from_data_url(url)


def test_load_image_from_a_path_bytes_or_a_data_url(tmp_path: Path) -> None:
    png = picture("PNG")
    path = tmp_path / "x.png"
    path.write_bytes(png)
    assert load_image(path) == load_image(png) == load_image(to_data_url(png)) == png
    with pytest.raises(FileNotFoundError):
        load_image(tmp_path / "missing.png")
    path.write_bytes(bytes((20 << 20) + 1))
    with pytest.raises(ImageError, match="20 MiB"):
        load_image(path)


def test_images_without_a_place_come_first() -> None:
    assert illustrated("text", 2) == (0, 1, "text")
    assert illustrated("text", 0) == ("text",)
