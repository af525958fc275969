"""The one place where pixels are resampled: antialiased bicubic on uint8, by the kernel of the released processors.

ATen's kernel on interleaved rows takes a fifth to a third of Pillow's time and is equal bit for bit to the processors. torch
is expensive to import, which is why workers are forked from a process that has it (see `forkserver`).
"""

import warnings

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


def resize_into(pixels: Pixels, out: Pixels) -> None:
    """Resample RGB rows to the size of `out`.

    Args:
        pixels: [H, W, 3] uint8, contiguous; not written to.
        out: [height, width, 3] uint8, contiguous.
    """
    if pixels.shape == out.shape:
        np.copyto(out, pixels)
        return
    target = torch.from_numpy(out).permute(2, 0, 1)[None]  # [1, 3, height, width] of interleaved memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Pillow hands out read-only memory, and it is only read here
        source = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    torch.ops.aten._upsample_bicubic2d_aa.out(source, list(out.shape[:2]), False, out=target)
