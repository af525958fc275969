"""Damaged files: whatever is flipped or cut, the answer is a picture of the planned size or a `MediaError`."""

import numpy as np
import pytest
from PIL import Image

from server.errors import MediaError
from server.media.geometry import IMAGE_AREA
from server.media.image import plan_image
from tests.media.media_cards import decode_image, encode, picture

CARD = Image.fromarray(picture(60, 44, seed=3))
ROTATED = Image.Exif()
ROTATED[0x0112] = 6
FILES = {
    "jpeg": encode(CARD, "JPEG", exif=ROTATED),
    "progressive": encode(CARD, "JPEG", progressive=True),
    "png": encode(CARD, "PNG", exif=ROTATED),
    "palette": encode(CARD.quantize(16), "PNG", transparency=3),
    "gif": encode(CARD, "GIF", save_all=True, append_images=[CARD.rotate(90)]),
    "webp": encode(CARD, "WEBP", exif=ROTATED),
    "avif": encode(CARD, "AVIF"),
    "bmp": encode(CARD, "BMP"),
    "tiff": encode(CARD, "TIFF", compression="tiff_lzw"),
    "fax": encode(CARD.convert("1"), "TIFF", compression="group4"),
    "ico": encode(CARD, "ICO"),
}
MAX_PIXELS = 1 << 22
NUM_VARIANTS = 200


def survives(data: bytes) -> bool:
    try:
        plan = plan_image(data, IMAGE_AREA, max_pixels=MAX_PIXELS)
        pixels = decode_image(data, plan.size, max_pixels=MAX_PIXELS)
    except MediaError:
        return False
    assert pixels.shape == (plan.size.height, plan.size.width, 3)
    return True


@pytest.mark.parametrize("name", FILES)
def test_flipped_bytes(name):
    rng = np.random.default_rng(list(name.encode()))
    assert survives(FILES[name])
    for _ in range(NUM_VARIANTS):
        damaged = bytearray(FILES[name])
        for position in rng.integers(0, len(damaged), size=rng.integers(1, 8)):
            damaged[position] ^= int(rng.integers(1, 256))
        survives(bytes(damaged))


@pytest.mark.parametrize("name", FILES)
def test_flipped_header_bytes(name):
    rng = np.random.default_rng(list(name.encode()))
    for _ in range(NUM_VARIANTS):
        damaged = bytearray(FILES[name])
        damaged[int(rng.integers(4, min(len(damaged), 120)))] = int(rng.integers(0, 256))
        survives(bytes(damaged))


@pytest.mark.parametrize("name", FILES)
def test_cut_files(name):
    data = FILES[name]
    for length in range(0, len(data), max(1, len(data) // NUM_VARIANTS)):
        survives(data[:length])
