"""Our pixels against the released processors' values, within 2 levels on fewer than 1 % of the values."""

import json
from pathlib import Path

import numpy as np
import pytest
from media_cards import encode, picture
from PIL import Image

from server.media.geometry import IMAGE_AREA, VIDEO_AREA, segments
from server.media.image import fill_image, plan_image
from server.media.patchify import CLIP_PATCH_BYTES
from server.media.video import preprocess_frames

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "preprocess.json").read_text())
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
MAX_PIXELS = 1 << 26


def normalized(patches: np.ndarray) -> np.ndarray:
    """[N, 3, 2, 14, 14] uint8 -> [N, 1176] float32, as the model does it."""
    mean, std = (255 * MEAN).reshape(1, 3, 1, 1, 1), (255 * STD).reshape(1, 3, 1, 1, 1)
    return ((patches.astype(np.float32) - mean) / std).reshape(len(patches), CLIP_PATCH_BYTES)


def levels_off(flat: np.ndarray, golden: dict) -> np.ndarray:
    """How far our values are from the 512 sampled ones, in levels of uint8."""
    assert list(flat.shape) == golden["shape"]
    assert flat.mean() == pytest.approx(golden["mean"], abs=2e-4)
    assert flat.std() == pytest.approx(golden["std"], abs=2e-4)
    index = np.array(golden["index"])
    level = 1 / (255 * STD[index % CLIP_PATCH_BYTES // (CLIP_PATCH_BYTES // 3)])
    return np.rint(np.abs(flat.reshape(-1)[index] - np.array(golden["value"])) / level)


def image_levels_off(golden: dict) -> np.ndarray:
    card = Image.fromarray(picture(golden["width"], golden["height"], golden["seed"]))
    data = encode(card, "BMP")
    plan = plan_image(data, IMAGE_AREA, max_pixels=MAX_PIXELS)
    assert list(plan.grid_thw) == golden["grid_thw"]
    flat = np.zeros(plan.num_bytes, np.uint8)
    fill_image(data, plan.size, max_pixels=MAX_PIXELS, out=flat)
    stills = flat.reshape(-1, 3, 1, 14, 14)
    return levels_off(normalized(np.repeat(stills, 2, axis=2)), golden)


def clip_levels_off(golden: dict) -> np.ndarray:
    frames = np.stack(
        [picture(golden["width"], golden["height"], 1000 * golden["seed"] + frame) for frame in range(golden["frames"])]
    )
    grid, patches = preprocess_frames(frames, VIDEO_AREA)
    assert [list(segment) for segment in segments(grid)] == golden["segments_thw"]
    return levels_off(normalized(patches), golden)


@pytest.mark.parametrize(("kind", "of"), [("images", image_levels_off), ("videos", clip_levels_off)])
def test_pixels_match_the_released_processors(kind, of):
    off = np.stack([of(golden) for golden in GOLDEN[kind]])  # [entries, 512]
    assert off.max() <= 2
    assert np.count_nonzero(off) < 0.01 * off.size
