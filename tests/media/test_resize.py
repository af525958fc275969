import numpy as np
import pytest
import torch
from media_cards import picture
from PIL import Image

from server.media.geometry import IMAGE_AREA, IMAGE_LONG_SIDE, Size, target_size
from server.media.resize import resize


def aten(pixels: np.ndarray, size: Size) -> np.ndarray:
    """The kernel behind the released processors, [height, width, 3] uint8."""
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(planes, size=(size.height, size.width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("width", "height"), [(640, 480), (480, 640), (337, 501), (472, 495), (100, 30), (31, 977), (900, 611), (57, 43), (5, 5)]
)
@pytest.mark.parametrize("rule", [IMAGE_AREA, IMAGE_LONG_SIDE], ids=["area", "long side"])
def test_pixels_are_those_of_the_aten_kernel_within_two_levels(width, height, rule):
    card = picture(width, height, seed=width)
    size = target_size(Size(width, height), rule)
    ours = resize(Image.fromarray(card), size)
    assert ours.shape == (size.height, size.width, 3)
    off = np.abs(ours.astype(int) - aten(card, size))
    assert off.max() <= 2
    assert np.count_nonzero(off) < 0.01 * off.size


def test_a_picture_of_the_right_size_stays_as_it_is():
    card = picture(56, 84, seed=1)
    assert np.array_equal(resize(Image.fromarray(card), Size(56, 84)), card)
