"""From resized pixels to the patches that the vision tower reads, still as bytes.

Patches come in merge-block order: temporal patch, block row, block column, then the 2x2 patches inside the block. The
model's side normalises; it must know this order and nothing else about pictures.
"""

import numpy as np
from numpy.typing import NDArray

from server.media.geometry import MERGE, PATCH, TEMPORAL_PATCH

Pixels = NDArray[np.uint8]

IMAGE_PATCH_BYTES = 3 * PATCH**2
"""One temporal copy: both temporal slots of a still are equal."""
CLIP_PATCH_BYTES = TEMPORAL_PATCH * IMAGE_PATCH_BYTES


def patchify_image(pixels: Pixels, out: Pixels) -> None:
    """Write a picture's patches into `out`.

    Args:
        pixels: [H, W, 3] uint8, both sides multiples of 28.
        out: [h * w, 3, 14, 14] uint8 where h = H / 14 and w = W / 14.
    """
    height, width, _ = pixels.shape
    rows, columns = height // (PATCH * MERGE), width // (PATCH * MERGE)
    blocks = pixels.reshape(rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    # row, block y, y, column, block x, x, channel -> row, column, block y, block x, channel, y, x
    np.copyto(out.reshape(rows, columns, MERGE, MERGE, 3, PATCH, PATCH), blocks.transpose(0, 3, 1, 4, 6, 2, 5))


def patchify_clip(frames: Pixels, out: Pixels) -> None:
    """Write a clip's patches into `out`; an odd last frame is paired with a copy of itself.

    Args:
        frames: [F, H, W, 3] uint8, both sides multiples of 28.
        out: [ceil(F / 2) * h * w, 3, 2, 14, 14] uint8.
    """
    num_frames, height, width, _ = frames.shape
    num_patches = height // PATCH * (width // PATCH)
    for index in range(0, num_frames, TEMPORAL_PATCH):
        pair = out[index // TEMPORAL_PATCH * num_patches :][:num_patches]  # [h * w, 3, 2, 14, 14]
        for slot in range(TEMPORAL_PATCH):
            still = np.empty((num_patches, 3, PATCH, PATCH), np.uint8)
            patchify_image(frames[min(index + slot, num_frames - 1)], still)
            pair[:, :, slot] = still
