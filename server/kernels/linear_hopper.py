"""Products of many tokens with an MXFP8 weight on Hopper: the weight becomes bf16 in registers, on its way to the matrix unit.

Weights are the rows of the matrix unit's tiles and tokens the columns, because only the row operand may come from registers.
Programs go through tiles of the output until none is left.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.hopper import box_descriptor
from server.kernels.launch import pdl_options, wait_for_inputs
from server.kernels.linear_hopper_kernel import linear_hopper_kernel
from server.kernels.mxfp8 import Mxfp8Weight

_ROWS = 64  # of a group of four warps
_SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["num_outputs", "num_splits"])
def _sum_splits_kernel(partial_ptr, out_ptr, num_outputs, num_splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (blocks of outputs,): sums over the splits in their order."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_outputs
    total = tl.zeros([BLOCK], tl.float32)
    wait_for_inputs(PDL)
    for i_s in range(num_splits):
        total += tl.load(partial_ptr + tl.cast(i_s, tl.int64) * num_outputs + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tile:
    """What a program takes at a time.

    Attributes:
        tokens: columns of the output tile, whose rows are 128 weights.
        step: inputs per copy.
        stages: copies in flight.
        band: row tiles that programs at work share, see `_place`.
        programs: per multiprocessor; two have few registers each.
    """

    tokens: int
    step: int
    stages: int
    band: int
    programs: int


def _tile_for(num_tokens: int) -> Tile:
    """The fastest tile measured on an H200; any gives the right result for any shape."""
    if num_tokens <= 32:
        return Tile(32, 64, 8, 8, 2)
    if num_tokens <= 64:
        return Tile(64, 64, 6, 8, 2)
    if num_tokens <= 128:
        return Tile(128, 128, 3, 8, 1)
    return Tile(256, 64, 3, 16, 1)


def _split(num_inputs: int, step: int, num_splits: int) -> tuple[int, int]:
    """(Splits of the inputs, at most so many; steps of each, an even number): copies from behind the last input are zeros."""
    num_pairs = triton.cdiv(num_inputs, 2 * step)
    pairs_of_split = triton.cdiv(num_pairs, max(1, min(num_splits, num_pairs // 2)))
    return triton.cdiv(num_pairs, pairs_of_split), 2 * pairs_of_split


def linear_hopper(x: Tensor, weight: Mxfp8Weight, tile: Tile | None = None) -> Tensor:
    """bf16 [T, K] times MXFP8 [N, K] to [T, N]; see `linear`. K is a multiple of 32, N of 8, rows of `x` begin on 16 bytes.

    Where the tiles of the output leave multiprocessors idle, up to 128 tokens, the inputs are split and the sums added.
    """
    (num_tokens, num_inputs), num_rows = x.shape, weight.shape[0]
    tile = tile or _tile_for(num_tokens)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    num_row_tiles, num_token_tiles = triton.cdiv(num_rows, 2 * _ROWS), triton.cdiv(num_tokens, tile.tokens)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count * tile.programs
    idle = programs // (num_row_tiles * num_token_tiles) if tile.tokens <= 128 else 1
    num_splits, num_steps = _split(num_inputs, tile.step, idle)
    num_tiles = num_row_tiles * num_token_tiles * num_splits
    partial = out if num_splits == 1 else torch.empty((num_splits, *out.shape), dtype=torch.float32, device=x.device)
    linear_hopper_kernel[(min(programs, num_tiles),)](
        box_descriptor(weight.values.view(torch.int16), (_ROWS, tile.step // 2)),
        weight.scales,
        box_descriptor(x, (tile.tokens, tile.step)),
        box_descriptor(out, (tile.tokens, _ROWS)),
        partial,
        num_tokens,
        num_rows,
        num_inputs,
        num_row_tiles,
        num_token_tiles,
        num_tiles,
        num_steps,
        ROWS=_ROWS,
        TOKENS=tile.tokens,
        STEP=tile.step,
        STAGES=tile.stages,
        BAND=tile.band,
        SPLIT=num_splits > 1,
        REGISTERS=232 if tile.programs == 1 else 104,
        num_warps=4,
        maxnreg=None if tile.programs == 1 else 80,
    )
    if num_splits > 1:
        grid = (triton.cdiv(out.numel(), _SUM_BLOCK),)
        _sum_splits_kernel[grid](partial, out, out.numel(), num_splits, BLOCK=_SUM_BLOCK, **pdl_options(x.device))
    return out
