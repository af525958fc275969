import numpy as np
import pytest

from server.media.patchify import patchify_clip, patchify_image


def random_frames(*shape):
    return np.random.default_rng(7).integers(0, 256, size=shape, dtype=np.uint8)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 6), (8, 4)])
def test_patches_come_block_by_block(rows, columns):
    pixels = random_frames(rows * 14, columns * 14, 3)
    out = np.full((rows * columns, 3, 14, 14), 99, np.uint8)
    patchify_image(pixels, out)
    order = [
        (block_row + y, block_column + x)
        for block_row in range(0, rows, 2)
        for block_column in range(0, columns, 2)
        for y in range(2)
        for x in range(2)
    ]
    for patch, (row, column) in zip(out, order, strict=True):
        square = pixels[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
        assert np.array_equal(patch, square.transpose(2, 0, 1))


@pytest.mark.parametrize("num_frames", [1, 2, 3, 8])
def test_clips_pair_their_frames_and_repeat_an_odd_last_one(num_frames):
    frames = random_frames(num_frames, 28, 56, 3)
    out = np.full(((num_frames + 1) // 2 * 8, 3, 2, 14, 14), 99, np.uint8)
    patchify_clip(frames, out)
    still = np.empty((8, 3, 14, 14), np.uint8)
    for pair in range(len(out) // 8):
        for slot in range(2):
            patchify_image(frames[min(2 * pair + slot, num_frames - 1)], still)
            assert np.array_equal(out[8 * pair : 8 * pair + 8, :, slot], still)
