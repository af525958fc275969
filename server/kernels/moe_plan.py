"""Sorting (token, choice) pairs by expert on the device.

Rows are pairs in the order of (expert, token); behind them, where there is a shared expert, one row per token for it. The rows
of an expert are cut into tiles of `step_rows`; the last one takes what is left, up to `max_rows`.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv
from server.kernels.launch import pdl_options, wait_for_inputs

_BLOCK_P = 128  # pairs that a program places


@dataclass(frozen=True)
class ExpertPlan:
    """Rows in expert order, and tiles of them.

    Attributes:
        pair_of_row: [R] int32, R = T * k (+ T with a shared expert): pair `token * k + choice`; `T * k + token` if shared.
        row_of_pair: [T * k] int32, the inverse.
        row_weights: [R] fp32: weight of the choice times the scaling; 1 if shared.
        tiles: [max tiles, 4] int32: expert, first row, number of rows, unused; undefined behind the number of tiles.
        num_tiles: [1] int32.
    """

    pair_of_row: Tensor
    row_of_pair: Tensor
    row_weights: Tensor
    tiles: Tensor
    num_tiles: Tensor

    @property
    def num_rows(self) -> int:
        """Rows of all experts."""
        return self.pair_of_row.shape[0]

    @property
    def max_tiles(self) -> int:
        """A bound for the number of tiles that does not depend on the routing."""
        return self.tiles.shape[0]


@triton.jit
def _count_tiles(rows, STEP_ROWS: tl.constexpr, MAX_ROWS: tl.constexpr):
    """Tiles of experts with so many rows."""
    return (tl.maximum(rows - (MAX_ROWS - STEP_ROWS), tl.minimum(rows, 1)) + STEP_ROWS - 1) // STEP_ROWS


@triton.jit
def _store_tiles(p_tile, expert, first_row, rows, tiles, most_tiles, STEP_ROWS: tl.constexpr):
    """Cut the rows of each expert into its number of tiles, of which none has more than `most_tiles`."""
    for i in range(most_tiles):
        m_tile = i < tiles
        tl.store(p_tile + i * 4, expert, mask=m_tile)
        tl.store(p_tile + i * 4 + 1, first_row + i * STEP_ROWS, mask=m_tile)
        tl.store(p_tile + i * 4 + 2, tl.where(i == tiles - 1, rows - i * STEP_ROWS, STEP_ROWS), mask=m_tile)


@triton.jit
def list_tiles(
    b_rows, tiles_ptr, num_tiles_ptr, num_pairs, num_tokens,
    E: tl.constexpr, SHARED: tl.constexpr, STEP_ROWS: tl.constexpr, MAX_ROWS: tl.constexpr,
):  # fmt: skip
    """Tiles of all experts, of which the routed ones have b_rows [BLOCK_E]."""
    b_first = tl.cumsum(b_rows, 0) - b_rows
    b_tiles = _count_tiles(b_rows, STEP_ROWS, MAX_ROWS)
    p_tile = tiles_ptr + (tl.cumsum(b_tiles, 0) - b_tiles) * 4
    _store_tiles(p_tile, tl.arange(0, b_rows.shape[0]), b_first, b_rows, b_tiles, tl.max(b_tiles, 0), STEP_ROWS)
    count = tl.sum(b_tiles, 0)
    if SHARED:
        tiles = _count_tiles(num_tokens, STEP_ROWS, MAX_ROWS)
        _store_tiles(tiles_ptr + count * 4, E, num_pairs, num_tokens, tiles, tiles, STEP_ROWS)
        count += tiles
    tl.store(num_tiles_ptr, count)


@direct_launch
@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr):
    """Grid (blocks of pairs,); counts is [blocks, BLOCK_E] int32: how many pairs of a block chose each expert."""
    o_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    m_p = o_p < num_pairs
    wait_for_inputs(PDL)
    b_counts = tl.histogram(tl.load(ids_ptr + o_p, mask=m_p, other=0), BLOCK_E, mask=m_p)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), b_counts)


@direct_launch
@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _place_kernel(
    ids_ptr, weights_ptr, counts_ptr, pair_of_row_ptr, row_of_pair_ptr, row_weights_ptr, tiles_ptr, num_tiles_ptr,
    num_pairs, num_tokens, scaling,
    E: tl.constexpr, SHARED: tl.constexpr, STEP_ROWS: tl.constexpr, MAX_ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of pairs,): places a block's pairs behind those of lower experts and of earlier blocks.

    The first program lists tiles. Pairs are compared, and counts read, BLOCK_Q at a time.
    """
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    begin = block * BLOCK_P
    o_p = begin + tl.arange(0, BLOCK_P)
    m_p = o_p < num_pairs
    o_e = tl.arange(0, BLOCK_E)[None, :]
    wait_for_inputs(PDL)
    b_ids = tl.load(ids_ptr + o_p, mask=m_p, other=0)
    b_weights = tl.load(weights_ptr + o_p, mask=m_p, other=0.0)
    b_all = tl.zeros([BLOCK_Q, BLOCK_E], dtype=tl.int32)
    b_before = tl.zeros([BLOCK_Q, BLOCK_E], dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_Q):
        o_b = first + tl.arange(0, BLOCK_Q)[:, None]
        b_counts = tl.load(counts_ptr + o_b * BLOCK_E + o_e, mask=o_b < num_blocks, other=0)
        b_all += b_counts
        b_before += tl.where(o_b < block, b_counts, 0)
    b_rows = tl.sum(b_all, 0)
    b_row = tl.gather(tl.cumsum(b_rows, 0) - b_rows + tl.sum(b_before, 0), b_ids, 0)
    for first in range(begin, begin + BLOCK_P, BLOCK_Q):
        o_q = first + tl.arange(0, BLOCK_Q)
        b_other = tl.load(ids_ptr + o_q, mask=o_q < num_pairs, other=-1)
        is_earlier = (b_other[:, None] == b_ids[None, :]) & (o_q[:, None] < o_p[None, :])
        b_row += tl.sum(is_earlier.to(tl.int32), 0)
    tl.store(row_of_pair_ptr + o_p, b_row, mask=m_p)
    tl.store(pair_of_row_ptr + b_row, o_p, mask=m_p)
    tl.store(row_weights_ptr + b_row, b_weights * scaling, mask=m_p)
    if SHARED:
        m_t = o_p < num_tokens
        tl.store(pair_of_row_ptr + num_pairs + o_p, num_pairs + o_p, mask=m_t)
        tl.store(row_weights_ptr + num_pairs + o_p, 1.0, mask=m_t)
    if block == 0:
        list_tiles(b_rows, tiles_ptr, num_tiles_ptr, num_pairs, num_tokens, E, SHARED, STEP_ROWS, MAX_ROWS)


def histogram_size(num_experts: int) -> int:
    """Bins of a histogram over experts: a power of two that a warp can share out."""
    return 1 << max(5, (num_experts - 1).bit_length())


def empty_plan(expert_ids: Tensor, num_experts: int, has_shared: bool, step_rows: int) -> ExpertPlan:
    """Room for the plan of [T, k] choices."""
    num_tokens, num_pairs, device = expert_ids.shape[0], expert_ids.numel(), expert_ids.device
    num_rows = num_pairs + (num_tokens if has_shared else 0)
    max_tiles = min(num_pairs, num_experts + num_pairs // step_rows)
    if has_shared:
        max_tiles += cdiv(num_tokens, step_rows)
    return ExpertPlan(
        pair_of_row=torch.empty((num_rows,), dtype=torch.int32, device=device),
        row_of_pair=torch.empty((num_pairs,), dtype=torch.int32, device=device),
        row_weights=torch.empty((num_rows,), dtype=torch.float32, device=device),
        tiles=torch.empty((max_tiles, 4), dtype=torch.int32, device=device),
        num_tiles=torch.empty((1,), dtype=torch.int32, device=device),
    )


def plan_experts(
    expert_ids: Tensor, weights: Tensor, scaling: float, num_experts: int, has_shared: bool, step_rows: int, max_rows: int
) -> ExpertPlan:
    """Sort [T, k] choices among `num_experts` routed experts; a shared expert has the number behind them."""
    plan = empty_plan(expert_ids, num_experts, has_shared, step_rows)
    num_pairs, device = expert_ids.numel(), expert_ids.device
    num_blocks, block_e = cdiv(num_pairs, _BLOCK_P), histogram_size(num_experts)
    counts = torch.empty((num_blocks, block_e), dtype=torch.int32, device=device)
    pdl = pdl_options(device)
    _count_kernel[(num_blocks,)](expert_ids, counts, num_pairs, BLOCK_E=block_e, BLOCK_P=_BLOCK_P, **pdl)
    _place_kernel[(num_blocks,)](
        expert_ids, weights, counts, plan.pair_of_row, plan.row_of_pair, plan.row_weights, plan.tiles, plan.num_tiles,
        num_pairs, expert_ids.shape[0], scaling, E=num_experts, SHARED=has_shared, STEP_ROWS=step_rows, MAX_ROWS=max_rows,
        BLOCK_E=block_e, BLOCK_P=_BLOCK_P, BLOCK_Q=32, **pdl,
    )  # fmt: skip
    return plan
