"""The patchify op: its twin against a walk over single pixels, and the Triton kernel against the twin."""

import numpy as np
import pytest
import torch

from server.kernels.patchify import PIXEL_MEAN, PIXEL_STD, patchify, patchify_torch
from server.kernels.patchify_triton import patchify_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 28, 28), (1, 56, 84), (2, 28, 56), (3, 84, 28), (8, 56, 56)]


def random_frames(num_frames, height, width):
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8))


def walked(frames):
    """Every value by the definition of its place, in float64."""
    num_frames, height, width, _ = frames.shape
    slots = min(num_frames, 2)
    patches = []
    for pair in range(-(-num_frames // 2)):
        for top in range(0, height, 28):
            for left in range(0, width, 28):
                for y, x in ((top, left), (top, left + 14), (top + 14, left), (top + 14, left + 14)):
                    shown = [frames[min(2 * pair + slot, num_frames - 1), y : y + 14, x : x + 14] for slot in range(slots)]
                    levels = np.stack(shown).astype(np.float64)  # [slots, 14, 14, 3]
                    values = (levels / 255 - np.array(PIXEL_MEAN)) / np.array(PIXEL_STD)
                    patches.append(values.transpose(3, 0, 1, 2).reshape(-1))
    return torch.from_numpy(np.stack(patches))


@pytest.mark.parametrize("shape", SHAPES)
def test_values_stand_in_merge_block_order_with_channel_frame_row_and_column_inside(shape):
    frames = random_frames(*shape)
    ours = patchify(frames)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), walked(frames.numpy()), atol=2e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_gives_the_twins_values_bit_by_bit(shape):
    frames = random_frames(*shape).to(DEVICE)
    assert torch.equal(patchify_triton(frames), patchify_torch(frames))


def test_a_still_holds_half_the_values_of_the_same_frame_shown_twice():
    still = random_frames(1, 28, 28)
    once, twice = patchify(still), patchify(torch.cat((still, still)))
    assert once.shape == (4, 588)
    assert torch.equal(once.view(4, 3, 1, 196).expand(-1, -1, 2, -1).reshape(4, -1), twice)
