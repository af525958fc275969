"""One encoded picture: what it is, what it will cost, and its pixels.

`plan_image` reads headers only, so that a picture that is too large is refused before a pixel is decoded; `fill_image`
decodes. Both belong in a worker process: the bytes are a stranger's. Whatever the decoder raises becomes a `MediaError`
with a text of our own, because the library's texts carry addresses and file contents.
"""

import contextlib
import hashlib
import io
import struct
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import AvifImagePlugin, IcoImagePlugin, Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

from server.errors import MediaError
from server.media.geometry import ResizeRule, Size, target_size
from server.media.resize import Pixels, resize_into
from server.media.sniff import sniff
from server.media.types import ImagePlan

PIXEL_VERSION = b"m3-image-1"
"""Changes whenever the same bytes and the same size would give other pixels."""

ALLOWED = ("JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "ICO")
# Imported so that they register themselves: Pillow loads only some formats unasked, and all of them when one is missing.
_REGISTERED = (AvifImagePlugin, IcoImagePlugin, TiffImagePlugin, WebPImagePlugin)
_ORIENTATION_TAG = 0x0112
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_UNSUPPORTED = {"I": "32 bits per channel", "F": "floating-point pixels", "LAB": "Lab colours"}
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def plan_image(data: bytes, rule: ResizeRule, *, max_pixels: int) -> ImagePlan:
    """Judge a picture by its headers.

    Args:
        data: encoded bytes; the format is sniffed.
        rule: resize rule.
        max_pixels: largest width times height, before the resize.

    Raises:
        MediaError: not an accepted format, unreadable headers, too many pixels, or too long a sliver.
    """
    with _opened(data) as (image, orientation):
        size = target_size(_checked_size(image, orientation, max_pixels), rule)
    digest = hashlib.sha256(PIXEL_VERSION + struct.pack("<II", size.width, size.height))
    digest.update(data)
    return ImagePlan(size, digest.digest())


def fill_image(data: bytes, size: Size, *, max_pixels: int, out: Pixels) -> None:
    """Decode a picture: the first frame, upright, without alpha (on white), resized.

    Args:
        data: encoded bytes.
        size: the plan's size.
        max_pixels: as in the plan.
        out: flat uint8 array of size.height * size.width * 3; it receives RGB rows.

    Raises:
        MediaError: the pixels cannot be decoded.
    """
    with _opened(data) as (image, orientation):
        expected = _checked_size(image, orientation, max_pixels)
        image.load()
        upright = image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image
        if Size(*upright.size) != expected:
            raise MediaError("The picture's pixels do not have the size that its header declares.")
        resize_into(np.asarray(_to_rgb(upright)), out.reshape(size.height, size.width, 3))


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[tuple[Image.Image, int]]:
    """The opened, undecoded image and its EXIF orientation; any fault in opening or using it is a `MediaError`."""
    found = sniff(data)
    if found not in ALLOWED:
        raise MediaError(f"The picture is {found}, which is not supported; send one of {', '.join(ALLOWED)}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limits are ours, and a strange tag is not worth a line in the log
            with Image.open(io.BytesIO(data), formats=[found]) as image:
                yield image, _orientation(image, data)
    except MediaError:
        raise
    except MemoryError:
        raise MediaError("Decoding the picture takes more memory than one picture may use.") from None
    except Image.DecompressionBombError:
        raise MediaError("The picture has too many pixels.") from None
    except UnidentifiedImageError:
        raise MediaError(f"The {found} picture has an unreadable header.") from None
    except Exception:
        # Decoders raise whatever fits them: OSError, SyntaxError, struct.error, zlib.error, KeyError, OverflowError...
        raise MediaError(f"The {found} picture is corrupt or truncated.") from None


def _checked_size(image: Image.Image, orientation: int, max_pixels: int) -> Size:
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(f"The picture has {width}x{height} pixels; the limit is {max_pixels} pixels.")
    return Size(height, width) if orientation >= 5 else Size(width, height)


def _orientation(image: Image.Image, data: bytes) -> int:
    """The EXIF orientation that still has to be applied, 1 for none; unreadable EXIF counts as none."""
    if image.format == "TIFF":
        return 1  # Pillow turns TIFF pixels and sizes by itself
    if image.format == "PNG" and "exif" not in image.info and (chunk := _png_exif(data)):
        image.info["exif"] = chunk
    try:
        # The base class's method: PNG's own override decodes the whole picture to look for late chunks.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and value in _UPRIGHT else 1


def _png_exif(data: bytes) -> bytes | None:
    """The payload of a PNG's eXIf chunk, also of one behind the pixels."""
    position = 8
    while position + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        if name == b"eXIf":
            return data[position + 8 : position + 8 + length]
        position += 12 + length
    return None


def _to_rgb(image: Image.Image) -> Image.Image:
    """Eight bits, three channels, transparent parts on white."""
    if image.mode in _SIXTEEN_BIT:
        # Pillow clips 16-bit gray to 255 when it converts, which turns pictures white.
        levels = np.asarray(image).astype(np.uint16)
        gray = (levels >> 8).astype(np.uint8)
        if isinstance(transparent := image.info.get("transparency"), int):
            gray[levels == transparent] = 255
        return Image.fromarray(gray).convert("RGB")
    if image.mode in _UNSUPPORTED:
        raise MediaError(f"Pictures with {_UNSUPPORTED[image.mode]} are not supported.")
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(layers, mask=layers.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")
