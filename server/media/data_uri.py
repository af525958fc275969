"""Data URIs to bytes, as tolerant as clients are careless and strict where a guess would show another picture.

Accepted: any spelling of scheme, type and parameters as long as one parameter is `base64`; line breaks and indents; a
missing padding; the URL-safe alphabet; `+` that became a space; one level of percent-encoding. Characters that are not
base64 are an error: dropping them would decode something, but not what was sent. The media type is not believed; the bytes
are sniffed later. Knows nothing about pictures.
"""

import binascii
import math

from server.errors import MediaError

CHUNK_CHARS = 1 << 18
"""Base64 is decoded in pieces (a multiple of four characters), so that a thread doing it lets the event loop run."""

_BLANKS = (b" ", b"\r", b"\n", b"\t")
_ESCAPES = ((b"%2B", b"+"), (b"%2F", b"/"), (b"%3D", b"="), (b"%0D", b"\r"), (b"%0A", b"\n"), (b"%09", b"\t"), (b"%20", b" "))
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def is_data_uri(url: str) -> bool:
    """Whether `url` has the scheme `data`, in any case, after optional blanks."""
    return url[:64].lstrip()[:5].lower() == "data:"


def decode_data_uri(url: str, *, max_bytes: int, param: str | None = None) -> bytes:
    """Decode a base64 data URI.

    Takes about 2 ms per megabyte; large ones belong in a thread.

    Args:
        url: the whole URI.
        max_bytes: largest result; checked before anything is decoded.
        param: request field to name in errors.

    Raises:
        MediaError: not a data URI, not base64, empty, or too large.
    """
    if not is_data_uri(url):
        raise MediaError("The media URL is not a data URI.", param=param)
    header, comma, payload = url.partition(",")
    if not comma:
        raise MediaError("The data URI has no comma between its header and its data.", param=param)
    if "base64" not in (part.strip().lower() for part in header.split(";")[1:]):
        raise MediaError("The data URI must be base64 encoded.", param=param)
    # Percent-encoding triples a character at most; whatever the spelling, this many characters cannot fit.
    if len(payload) > 3 * _num_chars(max_bytes):
        raise _too_large(max_bytes, param)
    try:
        text = payload.encode("ascii")
    except UnicodeEncodeError:
        raise MediaError("The data URI is not valid base64.", param=param) from None
    if b"%" in text:
        text = _unquote(text)
    try:
        data = _decode_chunks(text, max_bytes, param)
    except binascii.Error:
        data = _decode_careless(text, max_bytes, param)
    if not data:
        raise MediaError("The data URI is empty.", param=param)
    return data


def _num_chars(num_bytes: int) -> int:
    return math.ceil(num_bytes / 3) * 4


def _too_large(max_bytes: int, param: str | None) -> MediaError:
    return MediaError(f"The media exceeds the limit of {max_bytes} bytes.", param=param)


def _unquote(text: bytes) -> bytes:
    # Only what an encoder may have escaped in base64: a general unquote of megabytes of escapes takes seconds.
    for escaped, plain in _ESCAPES:
        text = text.replace(escaped, plain).replace(escaped.lower(), plain)
    return text


def _decode_chunks(text: bytes, max_bytes: int, param: str | None) -> bytes:
    max_chars = _num_chars(max_bytes)
    if len(text) > max_chars and len(text) - sum(map(text.count, _BLANKS)) > max_chars:
        raise _too_large(max_bytes, param)
    pieces = []
    for start in range(0, len(text), CHUNK_CHARS):
        chunk = text[start : start + CHUNK_CHARS]
        if chunk.endswith(b"=") and start + CHUNK_CHARS < len(text):
            raise binascii.Error("padding inside the data")
        pieces.append(binascii.a2b_base64(chunk, strict_mode=True))
    data = b"".join(pieces)
    if len(data) > max_bytes:
        raise _too_large(max_bytes, param)
    return data


def _decode_careless(text: bytes, max_bytes: int, param: str | None) -> bytes:
    text = text.strip(b" \r\n\t")
    in_lines = b"\n" in text or b"\r" in text
    text = text.translate(_URL_SAFE, b"\r\n\t")
    if b" " in text:
        # A form decoder turns + into a blank, which leaves the length whole; blanks that lay out lines do not count.
        whole = len(text) % 4 == 0 or (not text.endswith(b"=") and len(text) % 4 != 1)
        text = text.replace(b" ", b"" if in_lines or not whole else b"+")
    text = text.rstrip(b"=")
    text += b"=" * (-len(text) % 4)
    try:
        return _decode_chunks(text, max_bytes, param)
    except binascii.Error:
        raise MediaError("The data URI is not valid base64.", param=param) from None
