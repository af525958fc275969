"""Normalise and cut frames into patches on the GPU: one program per patch, one read and one write of everything."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.integers import next_power_of_2
from server.kernels.patchify import MERGE, PATCH, PIXEL_MEAN, PIXEL_STD, TEMPORAL_PATCH, patch_grid


@triton.jit
def _patchify_kernel(
    frames_ptr,
    out_ptr,
    num_frames,
    rows,
    columns,
    MEAN_R: tl.constexpr,
    MEAN_G: tl.constexpr,
    MEAN_B: tl.constexpr,
    STD_R: tl.constexpr,
    STD_G: tl.constexpr,
    STD_B: tl.constexpr,
    SLOTS: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (t * rows * columns,); frames [num_frames, rows * PATCH, columns * PATCH, 3], out one row per program."""
    SIZE: tl.constexpr = 3 * SLOTS * PATCH * PATCH
    patch = tl.program_id(0)
    inner = patch % (MERGE * MERGE)
    block = patch // (MERGE * MERGE)
    blocks_across = columns // MERGE
    row = block // blocks_across % (rows // MERGE) * MERGE + inner // MERGE
    column = block % blocks_across * MERGE + inner % MERGE
    pair = patch // (rows * columns)

    place = tl.arange(0, BLOCK)  # channel, frame of the pair, y, x
    inside = place < SIZE
    x = place % PATCH
    y = place // PATCH % PATCH
    slot = place // (PATCH * PATCH) % SLOTS
    channel = place // (PATCH * PATCH * SLOTS)
    frame = tl.minimum(pair * SLOTS + slot, num_frames - 1).to(tl.int64)
    line = frame * (rows * PATCH) + row * PATCH + y
    pixel = line * (columns * PATCH) + column * PATCH + x
    level = tl.load(frames_ptr + pixel * 3 + channel, mask=inside, other=0).to(tl.float32)
    mean = tl.where(channel == 0, MEAN_R, tl.where(channel == 1, MEAN_G, MEAN_B)).to(tl.float32)
    std = tl.where(channel == 0, STD_R, tl.where(channel == 1, STD_G, STD_B)).to(tl.float32)
    tl.store(out_ptr + patch.to(tl.int64) * SIZE + place, tl.div_rn(level - mean, std), mask=inside)


def patchify_triton(frames: Tensor) -> Tensor:
    """Frames [F, H, W, 3] uint8 to patches [t * h * w, 3 * s * 14 * 14] fp32; see `patchify`."""
    t, rows, columns = patch_grid(frames)
    slots = 1 if frames.shape[0] == 1 else TEMPORAL_PATCH
    size = 3 * slots * PATCH * PATCH
    out = torch.empty((t * rows * columns, size), dtype=torch.float32, device=frames.device)
    _patchify_kernel[(t * rows * columns,)](
        frames.contiguous(),
        out,
        frames.shape[0],
        rows,
        columns,
        *_CONSTANTS,
        SLOTS=slots,
        PATCH=PATCH,
        MERGE=MERGE,
        BLOCK=next_power_of_2(size),
        num_warps=4,
    )
    return out


def _in_levels(values: tuple[float, ...]) -> tuple[float, ...]:
    """Statistics in units of uint8, rounded to fp32 as the twin's are."""
    return tuple((torch.tensor(values) * 255.0).tolist())


_CONSTANTS = (*_in_levels(PIXEL_MEAN), *_in_levels(PIXEL_STD))
