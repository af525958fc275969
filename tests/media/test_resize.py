import numpy as np
import pytest
import torch
from PIL import Image

from server.media.geometry import IMAGE_AREA, IMAGE_LONG_SIDE, Size, target_size
from server.media.resize import resize_into
from tests.media.media_cards import picture

SIZES = [(640, 480), (480, 640), (337, 501), (472, 495), (100, 30), (31, 977), (900, 611), (57, 43), (5, 5)]


def resized(pixels: np.ndarray, size: Size) -> np.ndarray:
    out = np.full((size.height, size.width, 3), 99, np.uint8)
    resize_into(pixels, out)
    return out


def released(pixels: np.ndarray, size: Size) -> np.ndarray:
    """As the released processors call it, on one plane per colour."""
    planes = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()[None]
    out = torch.nn.functional.interpolate(planes, size=(size.height, size.width), mode="bicubic", antialias=True)
    return out[0].permute(1, 2, 0).numpy()


def two_passes(pixels: np.ndarray, size: Size) -> np.ndarray:
    """Pillow's, width first: each pass clips, so the order of the passes matters."""
    image = Image.fromarray(pixels).resize((size.width, pixels.shape[0]), Image.Resampling.BICUBIC)
    return np.asarray(image.resize((size.width, size.height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("rule", [IMAGE_AREA, IMAGE_LONG_SIDE], ids=["area", "long side"])
def test_pixels_are_those_of_the_released_processors(width, height, rule):
    card = picture(width, height, seed=width)
    size = target_size(Size(width, height), rule)
    ours = resized(card, size)
    assert np.array_equal(ours, released(card, size))
    off = np.abs(ours.astype(int) - two_passes(card, size))
    assert off.max() <= 2
    assert np.count_nonzero(off) < 0.01 * off.size


def test_a_picture_of_the_right_size_stays_as_it_is():
    card = picture(56, 84, seed=1)
    assert np.array_equal(resized(card, Size(56, 84)), card)


def test_read_only_pixels_are_resampled_without_a_warning_and_stay_as_they_are():
    card = picture(60, 40, seed=1)
    before = card.copy()
    card.flags.writeable = False
    assert np.array_equal(resized(card, Size(28, 28)), released(before, Size(28, 28)))
    assert np.array_equal(card, before)
