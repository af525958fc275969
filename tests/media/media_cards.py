"""Pictures that the media tests make themselves: a deterministic card, and encoded files of many kinds."""

import asyncio
import io
import struct
import zlib
from collections.abc import Coroutine
from typing import Any

import numpy as np
from PIL import Image

from server.media.geometry import Size
from server.media.image import fill_image

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def picture(width: int, height: int, seed: int) -> np.ndarray:
    """The card of the golden file, [height, width, 3] uint8: two ramps, a checker of 7x5 pixels, noise of +-24 levels."""
    rows, columns = np.arange(height)[:, None], np.arange(width)[None, :]
    ramp_x = np.broadcast_to(columns * 255 // max(width - 1, 1), (height, width))
    ramp_y = np.broadcast_to(rows * 255 // max(height - 1, 1), (height, width))
    checker = (columns // 7 + rows // 5) % 2 * 255
    card = np.dstack([ramp_x, ramp_y, checker])
    noise = np.random.default_rng(seed).integers(-24, 25, size=(height, width, 3))
    return np.clip(card + noise, 0, 255).astype(np.uint8)


def halves(width: int = 96, height: int = 64) -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decode_image(data: bytes, size: Size, *, max_pixels: int) -> np.ndarray:
    """What `fill_image` writes, [height, width, 3] uint8."""
    out = np.full(size.height * size.width * 3, 77, np.uint8)
    fill_image(data, size, max_pixels=max_pixels, out=out)
    return out.reshape(size.height, size.width, 3)


def png_chunk(name: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + name + payload + struct.pack(">I", zlib.crc32(name + payload))


def png_header(width: int, height: int, *, bits: int = 8, colour: int = 2) -> bytes:
    """A PNG that ends after its header."""
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))


def png_with(data: bytes, chunk: bytes, *, before: bytes = b"IDAT") -> bytes:
    """`data` with a chunk put before the first one named `before`."""
    position = data.index(before) - 4
    return data[:position] + chunk + data[position:]


def run(coroutine: Coroutine[Any, Any, Any], *, timeout_s: float = 60) -> Any:
    """Run a test's coroutine on an event loop of its own."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))
