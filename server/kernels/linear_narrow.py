"""Products of 9 to 128 tokens with an MXFP8 weight on Hopper: all multiprocessors get an equal share of the weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.device import num_multiprocessors
from server.kernels.hopper import box_descriptor
from server.kernels.integers import cdiv, next_power_of_2
from server.kernels.launch import pdl_options
from server.kernels.linear_narrow_kernel import linear_narrow_kernel, sum_shares_kernel
from server.kernels.mxfp8 import Mxfp8Weight

MAX_TOKENS = 128
STEP = 128
_SUM_BLOCK = 512


@dataclass(frozen=True)
class Tile:
    """How a product is cut.

    Attributes:
        row_groups: 2: two groups of four warps have 64 rows of a tile each; 1: they take turns with the inputs of 64 rows.
        stages: units of STEP inputs in flight; even if groups take turns.
        is_small: leave room for a second program on the multiprocessor, be it one of the next kernel.
    """

    row_groups: int
    stages: int
    is_small: bool


# By most tokens, the fastest measured on an H200: for few inputs, for a small and for a large weight.
_TILES = {
    16: (Tile(1, 8, True), Tile(1, 8, True), Tile(2, 5, True)),
    32: (Tile(1, 6, True), Tile(2, 4, True), Tile(2, 4, True)),
    64: (Tile(1, 6, False), Tile(2, 3, True), Tile(2, 6, False)),
    128: (Tile(1, 4, False), Tile(2, 4, False), Tile(2, 4, False)),
}
_FEW_INPUTS = 2048
_LARGE_WEIGHT = 16 * 128 * STEP  # numbers per multiprocessor


def _plan(tokens: int, num_rows: int, num_inputs: int, num_processors: int) -> tuple[Tile, int]:
    """Tile and number of programs. Small weights are cut so that no program has parts of two tiles; any plan is right."""
    few_inputs, small, large = _TILES[tokens]
    if num_inputs > _FEW_INPUTS and num_rows * num_inputs > _LARGE_WEIGHT * num_processors:
        return large, num_processors * (2 if large.is_small else 1)
    tile = few_inputs if num_inputs <= _FEW_INPUTS else small
    num_tiles = cdiv(num_rows, 64 * tile.row_groups)
    return tile, max(1, num_processors // num_tiles) * min(num_tiles, num_processors)


def linear_narrow(x: Tensor, weight: Mxfp8Weight, plan: tuple[Tile, int] | None = None) -> Tensor:
    """bf16 [T, K] times MXFP8 [N, K] to [T, N]; see `linear`.

    T is at most MAX_TOKENS, K a multiple of STEP, rows of `x` begin on 16 bytes.
    """
    (num_tokens, num_inputs), num_rows = x.shape, weight.shape[0]
    tokens = max(16, next_power_of_2(num_tokens))
    num_processors = num_multiprocessors(x.device)
    tile, most_programs = plan or _plan(tokens, num_rows, num_inputs, num_processors)
    rows, num_steps = 64 * tile.row_groups, num_inputs // STEP
    num_tiles = cdiv(num_rows, rows)
    num_units = num_tiles * num_steps
    programs = min(most_programs, num_units)
    is_whole = num_tiles % programs == 0
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    partial = out if is_whole else torch.empty((programs, 2, num_tokens, rows), dtype=torch.float32, device=x.device)
    pdl = pdl_options(x.device)
    linear_narrow_kernel[(programs,)](
        box_descriptor(weight.values.view(torch.int16), (64, STEP // 2)),
        weight.scales,
        box_descriptor(x, (tokens, STEP // 2)),
        out,
        partial,
        num_tokens,
        num_rows,
        num_inputs,
        num_units,
        num_steps,
        ROW_GROUPS=tile.row_groups,
        TOKENS=tokens,
        STAGES=tile.stages,
        REGISTERS=104 if tile.is_small else 232,
        num_warps=4,
        maxnreg=80 if tile.is_small else None,
        **pdl,
    )
    if not is_whole:
        block_t = _SUM_BLOCK // rows
        sum_shares_kernel[(num_tiles, cdiv(num_tokens, block_t))](
            partial,
            out,
            num_tokens,
            num_rows,
            num_units,
            num_steps,
            programs,
            ROWS=rows,
            BLOCK_T=block_t,
            MOST=cdiv(programs, num_tiles) + 1,
            **pdl,
        )
    return out
