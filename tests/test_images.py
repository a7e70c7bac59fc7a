"""Images at the edge: type, size and wholeness from the header and the structure, before anything is decoded."""

from __future__ import annotations

import base64
import io
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sakuradite.images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    ImageError,
    ImageHeader,
    check_image,
    from_base64,
    from_data_url,
    illustrated,
    load_image,
    read_header,
    to_data_url,
)


def encoded(kind: str, size: tuple[int, int] = (40, 30), mode: str = "RGB", **options: Any) -> bytes:
    """An image file with some structure in it, so that cutting it cuts into compressed data."""
    picture = Image.effect_mandelbrot(size, (-2.0, -1.2, 1.0, 1.2), 50).convert("RGB").convert(mode)
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def png(width: int, height: int, bits: int = 1) -> bytes:
    """A PNG of a given size whose pixels are not there: 40,000 x 40,000 in a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    """A small JPEG with another size written into its header."""
    data = bytearray(encoded("JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


TAKEN = {
    "JPEG": encoded("JPEG"),
    "progressive JPEG": encoded("JPEG", progressive=True),
    "JPEG with restart markers": encoded("JPEG", restart_marker_blocks=2),
    "gray JPEG": encoded("JPEG", mode="L"),
    "CMYK JPEG": encoded("JPEG", mode="CMYK"),
    "JPEG with EXIF": encoded("JPEG", exif=rotated()),
    "JPEG with a colour profile": encoded("JPEG", icc_profile=b"p" * 70_000),
    "JPEG with a comment": encoded("JPEG", comment=b"\xff\xd9 looks like an end, and is none"),
    "JPEG with bytes after its end": encoded("JPEG") + b"trailer",
    "JPEG with padding before a marker": encoded("JPEG").replace(b"\xff\xdb", b"\xff\xff\xff\xdb", 1),
    "PNG": encoded("PNG"),
    "palette PNG with transparency": encoded("PNG", mode="P", transparency=0),
    "PNG with alpha": encoded("PNG", mode="RGBA"),
    "1-bit PNG": encoded("PNG", mode="1"),
    "16-bit PNG": encoded("PNG", mode="I;16"),
    "PNG with EXIF": encoded("PNG", exif=rotated()),
    "PNG with bytes after its end": encoded("PNG") + b"trailer",
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    assert check_image(TAKEN[name]) == ImageHeader("png" if "PNG" in name else "jpeg", 40, 30)


def test_the_size_is_as_stored_before_any_rotation() -> None:
    assert read_header(encoded("JPEG", (4, 2), exif=rotated())) == ImageHeader("jpeg", 4, 2)


@pytest.mark.parametrize(
    "name", ["JPEG", "progressive JPEG", "JPEG with EXIF", "JPEG with a comment", "PNG", "1-bit PNG"]
)
def test_a_file_cut_anywhere_is_refused(name: str) -> None:
    data = TAKEN[name]
    for length in range(len(data) - 1):
        with pytest.raises(ImageError):
            check_image(data[:length])


@pytest.mark.parametrize("part", [0.5, 0.99])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_upload_that_broke_off(kind: str, part: float) -> None:
    data = encoded(kind, (800, 600))
    assert check_image(data)
    with pytest.raises(ImageError, match=f"the {kind} file is cut short"):
        check_image(data[: int(len(data) * part)])


OTHERS = {
    "nothing": b"",
    "text": b"hello",
    "GIF": encoded("GIF", mode="P"),
    "BMP": encoded("BMP"),
    "TIFF": encoded("TIFF"),
    "WEBP": encoded("WEBP"),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "PDF": b"%PDF-1.7",
    "a PNG behind a byte-order mark": b"\xef\xbb\xbf" + encoded("PNG"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_type(name: str) -> None:
    with pytest.raises(ImageError, match="not a JPEG or PNG file"):
        check_image(OTHERS[name])


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(40_000, 40_000), "40000 x 40000"),
        (png(12_000, 9_000), "12000 x 9000"),
        (png(MAX_IMAGE_PIXELS + 1, 1), f"{MAX_IMAGE_PIXELS + 1} x 1"),
        (png((1 << 31) - 1, (1 << 31) - 1), "2147483647 x 2147483647"),
        (jpeg(65_535, 65_535), "65535 x 65535"),
        (jpeg(50_000, 1_001), "50000 x 1001"),
    ],
)
def test_a_decompression_bomb_is_seen_in_its_header(data: bytes, size: str) -> None:
    assert len(data) < 20_000
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=f"{size} pixels; at most 50 megapixels are taken"):
            check_image(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_limits_are_taken_themselves() -> None:
    assert check_image(png(50_000, 1_000)).width == 50_000
    whole = encoded("JPEG")
    assert check_image(whole + bytes(MAX_IMAGE_BYTES - len(whole)))
    with pytest.raises(ImageError, match=f"{MAX_IMAGE_BYTES + 1} bytes; at most {MAX_IMAGE_BYTES} "):
        check_image(whole + bytes(MAX_IMAGE_BYTES + 1 - len(whole)))


@pytest.mark.parametrize("data", [png(0, 5), png(5, 0), jpeg(0, 5), jpeg(5, 0)])
def test_a_size_of_zero(data: bytes) -> None:
    with pytest.raises(ImageError, match="a size of zero"):
        check_image(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xe0",
        b"\xff\xd8\xff\xe0\x00\x00" + bytes(100),
        b"\xff\xd8\xff\xe0\xff\xff" + bytes(100),
        b"\xff\xd8\xff\xda\x00\x02\xff\xd9",
        b"\xff\xd8" + b"\xff\xd0" * 200_000,
        b"\xff\xd8" + b"\xff" * 200_000,
        b"\x89PNG\r\n\x1a\n",
        b"\x89PNG\r\n\x1a\n" + b"\xff" * 100,
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + bytes(12 * 200_000),
        png(40, 30)[:33] + (b"\x00\x00\x00\x00tEXt\x00\x00\x00\x00" * 100_000),
    ],
)
def test_crafted_files_are_refused_quickly(data: bytes) -> None:
    with pytest.raises(ImageError):
        check_image(data)


def test_nothing_is_decoded_and_no_decoder_is_needed() -> None:
    script = (
        "import sys; sys.modules['PIL'] = None\n"
        "from sakuradite.images import check_image\n"
        "print(check_image(sys.stdin.buffer.read()).width)"
    )
    result = subprocess.run([sys.executable, "-c", script], input=encoded("PNG"), capture_output=True, check=True)
    assert result.stdout.strip() == b"40"


def url(data: bytes, kind: str = "image/png", tail: str = ";base64") -> str:
    return f"data:{kind}{tail},{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    "text",
    [
        url(TAKEN["PNG"]),
        url(TAKEN["JPEG"], "image/jpeg"),
        url(TAKEN["JPEG"], "image/jpg"),
        url(TAKEN["JPEG"], "image/png"),
        url(TAKEN["PNG"], "IMAGE/PNG", ";BASE64"),
        url(TAKEN["PNG"], "image/png", ";name=a.png;base64"),
    ],
)
def test_data_urls(text: str) -> None:
    assert from_data_url(text) in (TAKEN["PNG"], TAKEN["JPEG"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "send a base64 data URL"),
        ("https://example.org/secret.png", "remote URLs are not fetched"),
        ("HTTP://example.org/secret.png", "remote URLs are not fetched"),
        ("file:///etc/secret", "send a base64 data URL"),
        ("/etc/secret", "send a base64 data URL"),
        (url(TAKEN["PNG"], "image/gif"), "the data URL's type must be image/png or image/jpeg"),
        (url(TAKEN["PNG"], "text/plain"), "the data URL's type must be"),
        (url(TAKEN["PNG"], ""), "the data URL's type must be"),
        (url(TAKEN["PNG"], tail=""), "the data URL must be base64"),
        ("data:image/png;base64,", "not a JPEG or PNG file"),
        ("data:image/png;base64,secret!", "not valid base64"),
        ("data:image/png;base64,c2VjcmV0", "not a JPEG or PNG file"),
        (url(TAKEN["PNG"])[:-1], "not valid base64"),
        (url(TAKEN["PNG"])[:-8], "the PNG file is cut short"),
        (url(TAKEN["PNG"]).replace("AAAA", "AA\nAA", 1), "not valid base64"),
        ("data:image/png;base64," + "A" * (28 << 20), "at most 20971520 (20 MiB) are taken"),
        ("data:" + "x" * 10_000 + ";base64,AAAA", "send a base64 data URL"),
    ],
)  # fmt: skip
def test_data_urls_that_are_not_taken(text: str, reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        from_data_url(text)
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_bytes_paths_and_urls_give_the_same_image(tmp_path: Path) -> None:
    data = TAKEN["JPEG"]
    (path := tmp_path / "a.jpg").write_bytes(data)
    assert (
        load_image(data)
        == load_image(path)
        == load_image(to_data_url(data))
        == from_base64(base64.b64encode(data).decode())
        == data
    )
    assert to_data_url(data).startswith("data:image/jpeg;base64,")
    assert to_data_url(TAKEN["PNG"]).startswith("data:image/png;base64,")


def test_a_path_is_measured_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(40 << 30)  # sparse: 40 GB that nobody has
    with pytest.raises(ImageError, match="42949672960 bytes; at most"):
        load_image(path)
    with pytest.raises(FileNotFoundError):
        load_image(tmp_path / "none.png")


def test_images_without_a_place_come_first() -> None:
    assert illustrated("text", 2) == (0, 1, "text")
    assert illustrated("text", 0) == ("text",)
