"""A request's body: bounded while it is read and while it is expanded, and the parts of a multipart form."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sakuradite.errors import InvalidRequestError, RequestTooLargeError, UnsupportedMediaTypeError
from sakuradite.http.problems import invalid

if TYPE_CHECKING:
    import zstandard

type Receive = Callable[[], Awaitable[dict[str, Any]]]
type Headers = Mapping[bytes, bytes]

READ_TIMEOUT = 30.0  # seconds without a byte of the body; a caller that stalls would hold a place for ever
MIN_ZSTD_WINDOW = 8 << 20  # what RFC 9659 lets an HTTP sender use
ZSTD_SLICE = 512  # compressed bytes at a time: at most 16 MiB can come out of them before the limit is looked at
MAX_PART_HEAD = 4096  # bytes of a part's own headers
MAX_PARTS = 64  # of a multipart form: a request and its images need nine


class ClientGone(Exception):
    """The caller closed the connection; there is nobody to answer."""


def declared_length(headers: Headers, limit: int) -> int | None:
    """The Content-Length, checked; None when chunked. Raises InvalidRequestError or RequestTooLargeError."""
    text = headers.get(b"content-length")
    if text is None:
        return None
    if not text.isdigit():
        raise InvalidRequestError("Content-Length must be one number of bytes", param="Content-Length")
    if (length := int(text[:19])) > limit:
        raise _too_large(limit, length)
    return length


async def read_body(receive: Receive, headers: Headers, limit: int, hold: Callable[[int], None] | None = None) -> bytes:
    """The whole body, still encoded. Stops at `limit` bytes whatever Content-Length promised.

    `hold` is told of the bytes as they come; it may raise.

    Raises RequestTooLargeError, InvalidRequestError (length, or no byte for `READ_TIMEOUT`) and ClientGone.
    """
    length = declared_length(headers, limit)
    message = await receive()  # the usual case: one message with everything, so no timer
    chunks, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        if chunk := message.get("body", b""):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            if hold is not None:
                hold(len(chunk))
        if not message.get("more_body", False):
            break
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                message = await receive()
        except TimeoutError:
            raise InvalidRequestError(f"no byte of the body arrived for {READ_TIMEOUT:g} seconds") from None
    if length is not None and size != length:
        raise InvalidRequestError(f"Content-Length says {length} bytes, {size} came", param="Content-Length")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def expand(body: bytes, headers: Headers, limit: int) -> bytes:
    """The body without its Content-Encoding; the limit counts the bytes as they come out.

    Raises UnsupportedMediaTypeError for another encoding, RequestTooLargeError, ValidationError for damaged data.
    """
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    match encoding:
        case b"identity" | b"":
            return body
        case b"gzip" | b"x-gzip":
            return _gunzip(body, limit)
        case b"zstd":
            return _unzstd(body, limit)
    raise UnsupportedMediaTypeError(
        "Content-Encoding must be zstd, gzip or identity; only one is taken", param="Content-Encoding"
    )


def _gunzip(body: bytes, limit: int) -> bytes:
    out: list[bytes] = []
    size = 0
    rest = body
    try:
        while rest or not out:  # a gzip file may have several members
            member = zlib.decompressobj(wbits=31)
            data = member.decompress(rest, limit + 1 - size)
            size += len(data)
            if size > limit:
                raise _too_large(limit)
            if not member.eof:
                raise zlib.error
            out.append(data)
            rest = member.unused_data
    except zlib.error:
        raise invalid(("body",), "The gzip data is damaged or cut short", "encoding_invalid") from None
    return b"".join(out)


def _unzstd(body: bytes, limit: int) -> bytes:
    import zstandard  # of [server]; clients import this package for its messages

    decompressor = zstandard.ZstdDecompressor(max_window_size=max(MIN_ZSTD_WINDOW, 1 << (limit - 1).bit_length()))
    try:
        declared = zstandard.frame_content_size(body)
        if declared > limit:
            raise _too_large(limit, declared)
        if declared >= 0:  # the usual case: one frame that says its size, and is held to it
            try:
                return decompressor.decompress(body, allow_extra_data=False)
            except zstandard.ZstdError:
                pass  # more frames may follow; the slow path tells
        return _unzstd_frames(decompressor, body, limit)
    except zstandard.ZstdError:
        raise invalid(("body",), "The zstd data is damaged or cut short", "encoding_invalid") from None


def _unzstd_frames(decompressor: zstandard.ZstdDecompressor, body: bytes, limit: int) -> bytes:
    import zstandard

    out: list[bytes] = []
    size = 0
    frame = decompressor.decompressobj()
    for start in range(0, len(body), ZSTD_SLICE):
        piece = body[start : start + ZSTD_SLICE]
        while piece:
            if frame.eof:
                frame = decompressor.decompressobj()
            out.append(frame.decompress(piece))
            size += len(out[-1])
            if size > limit:
                raise _too_large(limit)
            piece = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise zstandard.ZstdError
    return b"".join(out)


def _too_large(limit: int, size: int | None = None) -> RequestTooLargeError:
    seen = f"it has {size} bytes, " if size is not None else ""
    return RequestTooLargeError(f"the body is too large: {seen}at most {limit} bytes are taken, after decompression")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a multipart form."""

    name: str
    content: bytes


BOUNDARY = re.compile(
    r"""multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s";]{1,70}))""", re.IGNORECASE
)
PART_NAME = re.compile(rb'content-disposition:\s*form-data\s*;(?:[^\r\n]*;)?\s*name="([^"\r\n]*)"', re.IGNORECASE)


def read_parts(body: bytes, content_type: str) -> list[Part]:
    """The parts of a `multipart/form-data` body in order. Raises ValidationError for a form that is not well made."""
    match = BOUNDARY.match(content_type)
    if match is None:
        raise UnsupportedMediaTypeError("multipart/form-data needs a boundary", param="Content-Type")
    mark = b"--" + (match[1] or match[2]).encode()
    pieces = (b"\r\n" + body).split(b"\r\n" + mark, MAX_PARTS + 2)
    if len(pieces) > MAX_PARTS + 2:
        raise invalid(("body",), f"The multipart form has over {MAX_PARTS} parts", "multipart_invalid")
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise invalid(("body",), "The multipart form is cut short or has no parts", "multipart_invalid")
    parts = []
    for piece in pieces[1:-1]:
        head, gap, content = piece.partition(b"\r\n\r\n")
        name = PART_NAME.search(head) if len(head) <= MAX_PART_HEAD else None
        if not gap or name is None:
            raise invalid(("body",), "A part of the multipart form has no name", "multipart_invalid")
        parts.append(Part(name[1].decode(errors="replace"), content))
    return parts
