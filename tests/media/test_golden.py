"""Our pixels against the released processors' values, within 2 levels on fewer than 1 % of the values."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from server.kernels.patchify import patchify_torch
from server.media.geometry import IMAGE_AREA, VIDEO_AREA, Size, grid_of, target_size
from server.media.image import plan_image
from server.media.resize import resize_into
from tests.media.media_cards import decode_image, encode, picture

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "preprocess.json").read_text())
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
PATCH_LEN = 3 * 2 * 14 * 14
MAX_PIXELS = 1 << 26


def patches_of(frames: np.ndarray) -> np.ndarray:
    """[F, H, W, 3] uint8 -> [N, 1176] float32, as the model does it."""
    return patchify_torch(torch.from_numpy(frames)).numpy()


def levels_off(flat: np.ndarray, golden: dict) -> np.ndarray:
    """How far our values are from the 512 sampled ones, in levels of uint8."""
    assert list(flat.shape) == golden["shape"]
    assert flat.mean() == pytest.approx(golden["mean"], abs=2e-4)
    assert flat.std() == pytest.approx(golden["std"], abs=2e-4)
    index = np.array(golden["index"])
    level = 1 / (255 * STD[index % PATCH_LEN // (PATCH_LEN // 3)])
    return np.rint(np.abs(flat.reshape(-1)[index] - np.array(golden["value"])) / level)


def image_levels_off(golden: dict) -> np.ndarray:
    card = Image.fromarray(picture(golden["width"], golden["height"], golden["seed"]))
    data = encode(card, "BMP")
    plan = plan_image(data, IMAGE_AREA, max_pixels=MAX_PIXELS)
    assert list(grid_of(plan.size)) == golden["grid_thw"]
    still = decode_image(data, plan.size, max_pixels=MAX_PIXELS)
    return levels_off(patches_of(np.stack([still, still])), golden)


def clip_levels_off(golden: dict) -> np.ndarray:
    frames = np.stack(
        [picture(golden["width"], golden["height"], 1000 * golden["seed"] + frame) for frame in range(golden["frames"])]
    )
    size = target_size(Size(golden["width"], golden["height"]), VIDEO_AREA)
    resized = np.empty((len(frames), size.height, size.width, 3), np.uint8)
    for frame, out in zip(frames, resized, strict=True):
        resize_into(frame, out)
    parts = golden["segments_thw"]  # the processor cuts along time
    assert grid_of(size, len(frames)) == (sum(part[0] for part in parts), *parts[0][1:])
    return levels_off(patches_of(resized if len(resized) > 1 else np.repeat(resized, 2, axis=0)), golden)


@pytest.mark.parametrize(("kind", "of"), [("images", image_levels_off), ("videos", clip_levels_off)])
def test_pixels_match_the_released_processors(kind, of):
    off = np.stack([of(golden) for golden in GOLDEN[kind]])  # [entries, 512]
    assert off.max() <= 2
    assert np.count_nonzero(off) < 0.01 * off.size
