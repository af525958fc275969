"""Clips that are already frames in memory: a common size, pairs of frames, patches.

Opening containers and choosing frames is not done here.
"""

import numpy as np
from PIL import Image

from server.media.geometry import PATCH, TEMPORAL_PATCH, ResizeRule, Size, grid_of, target_size
from server.media.patchify import Pixels, patchify_clip
from server.media.resize import resize


def preprocess_frames(frames: Pixels, rule: ResizeRule) -> tuple[tuple[int, int, int], Pixels]:
    """Resize a clip's frames and cut them into patches.

    Args:
        frames: [F, H, W, 3] uint8 RGB, F >= 1.
        rule: decides the common size of the frames.

    Returns:
        the grid (t, h, w) and the patches [t * h * w, 3, 2, 14, 14] uint8.

    Raises:
        MediaError: the frames' sides are not acceptable.
    """
    num_frames, height, width, _ = frames.shape
    size = target_size(Size(width, height), rule)
    t, h, w = grid_of(size, num_frames)
    resized = np.stack([resize(Image.fromarray(frame), size) for frame in frames])  # [F, h * 14, w * 14, 3]
    patches = np.empty((t * h * w, 3, TEMPORAL_PATCH, PATCH, PATCH), np.uint8)
    patchify_clip(resized, patches)
    return (t, h, w), patches
