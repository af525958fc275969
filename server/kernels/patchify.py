"""From RGB frames as bytes to the normalised patches that the vision tower projects, in one pass.

`y = (x - 255 * mean) / (255 * std)` in fp32 with CLIP's statistics. Patches come in merge-block order: temporal patch, block
row, block column, then the 2x2 patches inside the block; a patch is laid out as (channel, frame, y, x). A still needs one
copy in time, because both frames of its temporal patch are equal and their weights can be added beforehand.
"""

import torch
from torch import Tensor

PATCH = 14
MERGE = 2
TEMPORAL_PATCH = 2

# CLIP's RGB statistics, for pixel values in [0, 1].
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


def patch_grid(frames: Tensor) -> tuple[int, int, int]:
    """Temporal patches, patch rows and patch columns of frames [F, H, W, 3]."""
    return -(-frames.shape[0] // TEMPORAL_PATCH), frames.shape[1] // PATCH, frames.shape[2] // PATCH


def patchify_torch(frames: Tensor) -> Tensor:
    """Twin of `patchify`."""
    mean = torch.tensor(PIXEL_MEAN, device=frames.device) * 255.0
    std = torch.tensor(PIXEL_STD, device=frames.device) * 255.0
    t, h, w = patch_grid(frames)
    slots = 1 if frames.shape[0] == 1 else TEMPORAL_PATCH
    if frames.shape[0] % slots:
        frames = torch.cat((frames, frames[-1:]))
    normalized = (frames.float() - mean) / std  # [t * slots, H, W, 3]
    blocks = normalized.view(t, slots, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH, 3)
    # t, slot, block row, y in block, y, block column, x in block, x, channel
    return blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, 3 * slots * PATCH * PATCH)


def patchify(frames: Tensor) -> Tensor:
    """Normalise frames and cut them into patches.

    Args:
        frames: [F, H, W, 3] uint8 RGB, contiguous; H and W are multiples of 28. An odd last frame is paired with itself.

    Returns:
        [t * h * w, 3 * s * 14 * 14] fp32 where t = ceil(F / 2), h = H / 14, w = W / 14, and s = 1 for a single frame, else 2.
    """
    if frames.is_cuda:
        from server.kernels.patchify_triton import patchify_triton

        return patchify_triton(frames)
    return patchify_torch(frames)
