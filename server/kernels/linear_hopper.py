"""Products of many tokens with an MXFP8 weight on Hopper: the weight becomes bf16 in registers, on its way to the matrix unit.

Weights are the rows of the matrix unit's tiles and tokens the columns, because only the row operand may come from registers.
Programs go through tiles of the output until none is left.
"""

import torch
from torch import Tensor

from server.kernels.device import num_multiprocessors
from server.kernels.hopper import box_descriptor
from server.kernels.integers import cdiv
from server.kernels.linear_hopper_kernel import linear_hopper_kernel
from server.kernels.mxfp8 import Mxfp8Weight

_ROWS = 64  # of a group of four warps
_TOKENS = 256
_STEP = 64
_STAGES = 3
_BAND = 16  # row tiles that programs at work share, see `_place`


def linear_hopper(x: Tensor, weight: Mxfp8Weight) -> Tensor:
    """bf16 [T, K] times MXFP8 [N, K] to [T, N]; see `linear`. K is a multiple of 32, N of 8, rows of `x` begin on 16 bytes."""
    (num_tokens, num_inputs), num_rows = x.shape, weight.shape[0]
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    num_row_tiles, num_token_tiles = cdiv(num_rows, 2 * _ROWS), cdiv(num_tokens, _TOKENS)
    programs = num_multiprocessors(x.device)
    linear_hopper_kernel[(min(programs, num_row_tiles * num_token_tiles),)](
        box_descriptor(weight.values.view(torch.int16), (_ROWS, _STEP // 2)),
        weight.scales,
        box_descriptor(x, (_TOKENS, _STEP)),
        box_descriptor(out, (_TOKENS, _ROWS)),
        num_rows,
        num_inputs,
        num_row_tiles,
        num_token_tiles,
        2 * cdiv(num_inputs, 2 * _STEP),
        ROWS=_ROWS,
        TOKENS=_TOKENS,
        STEP=_STEP,
        STAGES=_STAGES,
        BAND=_BAND,
        REGISTERS=232,
        num_warps=4,
    )
    return out
