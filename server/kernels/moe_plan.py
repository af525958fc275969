"""Sorting (token, choice) pairs by expert on the device, and summing what the experts gave back per token.

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

from server.kernels.launch import pdl_options, wait_for_inputs

_BLOCK_P = 4096
_BLOCK_ROWS = 32


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


@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _sort_kernel(
    ids_ptr, weights_ptr, pair_of_row_ptr, row_of_pair_ptr, row_weights_ptr, starts_ptr, num_pairs, num_tokens, scaling,
    E: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (E, or E + 1 with a shared expert): places the pairs of one expert, in order, behind those of lower experts."""
    expert = tl.program_id(0)
    o_p = tl.arange(0, BLOCK_P)
    wait_for_inputs(PDL)
    if expert == E:
        for begin in range(0, num_tokens, BLOCK_P):
            m_t = begin + o_p < num_tokens
            tl.store(pair_of_row_ptr + num_pairs + begin + o_p, num_pairs + begin + o_p, mask=m_t)
            tl.store(row_weights_ptr + num_pairs + begin + o_p, 1.0, mask=m_t)
        tl.store(starts_ptr + E, num_pairs)
        tl.store(starts_ptr + E + 1, num_pairs + num_tokens)
        return
    lower = tl.zeros([BLOCK_P], dtype=tl.int32)
    for begin in range(0, num_pairs, BLOCK_P):
        b_ids = tl.load(ids_ptr + begin + o_p, mask=begin + o_p < num_pairs, other=E)
        lower += (b_ids < expert).to(tl.int32)
    row = tl.sum(lower, 0)
    tl.store(starts_ptr + expert, row)
    for begin in range(0, num_pairs, BLOCK_P):
        b_ids = tl.load(ids_ptr + begin + o_p, mask=begin + o_p < num_pairs, other=E)
        is_ours = b_ids == expert
        place = row + tl.cumsum(is_ours.to(tl.int32), 0) - 1
        tl.store(pair_of_row_ptr + place, begin + o_p, mask=is_ours)
        tl.store(row_of_pair_ptr + begin + o_p, place, mask=is_ours)
        b_weight = tl.load(weights_ptr + begin + o_p, mask=is_ours, other=0.0)
        tl.store(row_weights_ptr + place, b_weight * scaling, mask=is_ours)
        row += tl.sum(is_ours.to(tl.int32), 0)
    tl.store(starts_ptr + E, row, mask=expert == E - 1)


@triton.jit
def _tile_kernel(
    starts_ptr, tiles_ptr, num_tiles_ptr,
    STEP_ROWS: tl.constexpr, MAX_ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1,): cuts the rows of each of EXPERTS experts into tiles."""
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < EXPERTS
    wait_for_inputs(PDL)
    b_start = tl.load(starts_ptr + o_e, mask=m_e, other=0)
    b_rows = tl.load(starts_ptr + o_e + 1, mask=m_e, other=0) - b_start
    b_tiles = (tl.maximum(b_rows - (MAX_ROWS - STEP_ROWS), tl.minimum(b_rows, 1)) + STEP_ROWS - 1) // STEP_ROWS
    p_tile = tiles_ptr + (tl.cumsum(b_tiles, 0) - b_tiles) * 4
    for i in range(tl.max(b_tiles, 0)):
        m_tile = i < b_tiles
        b_height = tl.where(i == b_tiles - 1, b_rows - i * STEP_ROWS, STEP_ROWS)
        tl.store(p_tile + i * 4, o_e, mask=m_tile)
        tl.store(p_tile + i * 4 + 1, b_start + i * STEP_ROWS, mask=m_tile)
        tl.store(p_tile + i * 4 + 2, b_height, mask=m_tile)
    tl.store(num_tiles_ptr, tl.sum(b_tiles, 0))


@triton.jit
def _permuted(b_x):
    """Columns [R, C] in the order in which MXFP8 weights enter a product, see `moe_hopper`.

    Bits of a column within 128, high to low: c1 c0 h s1 s0 j1 j0; the same bits as they are stored: h s1 s0 j0 c1 c0 j1.
    """
    R: tl.constexpr = b_x.shape[0]
    C: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [R, C // 128, 4, 8, 2, 2]), (0, 1, 3, 5, 2, 4)), [R, C])


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def _gather_kernel(
    x_ptr, pair_of_row_ptr, out_ptr, num_pairs, num_rows, stride_x,
    H: tl.constexpr, TOPK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
    PERMUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of the width): rows of x in expert order, columns in that of `_permuted` if PERMUTE."""
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_r = o_r < num_rows
    wait_for_inputs(PDL)
    b_pair = tl.load(pair_of_row_ptr + o_r, mask=m_r, other=0)
    b_token = tl.where(b_pair < num_pairs, b_pair // TOPK, b_pair - num_pairs)
    m_x = m_r[:, None] & (o_h < H)[None, :]
    b_x = tl.load(x_ptr + b_token.to(tl.int64)[:, None] * stride_x + o_h[None, :], mask=m_x)
    if PERMUTE:
        b_x = _permuted(b_x)
    tl.store(out_ptr + o_r.to(tl.int64)[:, None] * H + o_h[None, :], b_x, mask=m_x)


@triton.jit(do_not_specialize=["num_pairs"])
def _combine_kernel(
    rows_ptr, row_of_pair_ptr, out_ptr, num_pairs,
    H: tl.constexpr, TOPK: tl.constexpr, SHARED: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of the hidden width): fp32 sum of a token's rows, in the order of its choices."""
    token = tl.program_id(0)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    for j in tl.static_range(TOPK):
        row = tl.load(row_of_pair_ptr + token * TOPK + j).to(tl.int64)
        acc += tl.load(rows_ptr + row * H + o_h, mask=m_h, other=0.0).to(tl.float32)
    if SHARED:
        acc += tl.load(rows_ptr + (num_pairs + token).to(tl.int64) * H + o_h, mask=m_h, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * H + o_h, acc.to(out_ptr.dtype.element_ty), mask=m_h)


def plan_experts(
    expert_ids: Tensor, weights: Tensor, scaling: float, num_experts: int, has_shared: bool, step_rows: int, max_rows: int
) -> ExpertPlan:
    """Sort [T, k] choices among `num_experts` routed experts; a shared expert has the number behind them."""
    num_tokens = expert_ids.shape[0]
    num_pairs, device = expert_ids.numel(), expert_ids.device
    num_rows = num_pairs + (num_tokens if has_shared else 0)
    max_tiles = min(num_pairs, num_experts + num_pairs // step_rows)
    if has_shared:
        max_tiles += triton.cdiv(num_tokens, step_rows)
    plan = ExpertPlan(
        pair_of_row=torch.empty((num_rows,), dtype=torch.int32, device=device),
        row_of_pair=torch.empty((num_pairs,), dtype=torch.int32, device=device),
        row_weights=torch.empty((num_rows,), dtype=torch.float32, device=device),
        tiles=torch.empty((max_tiles, 4), dtype=torch.int32, device=device),
        num_tiles=torch.empty((1,), dtype=torch.int32, device=device),
    )
    starts = torch.empty((num_experts + 2,), dtype=torch.int32, device=device)
    pdl = pdl_options(device)
    block_p = min(_BLOCK_P, triton.next_power_of_2(num_pairs))
    _sort_kernel[(num_experts + has_shared,)](
        expert_ids, weights, plan.pair_of_row, plan.row_of_pair, plan.row_weights, starts, num_pairs, num_tokens, scaling,
        E=num_experts, BLOCK_P=block_p, num_warps=min(8, max(1, block_p // 128)), **pdl,
    )  # fmt: skip
    _tile_kernel[(1,)](
        starts, plan.tiles, plan.num_tiles, STEP_ROWS=step_rows, MAX_ROWS=max_rows, EXPERTS=num_experts + has_shared,
        BLOCK_E=triton.next_power_of_2(num_experts + has_shared), **pdl,
    )  # fmt: skip
    return plan


def gather_rows(x: Tensor, plan: ExpertPlan, topk: int, permute: bool) -> Tensor:
    """Rows [R, H] of x [T, H] in expert order, with permuted columns if `permute`."""
    out = x.new_empty((plan.num_rows, x.shape[1]))
    block_h = min(512, triton.next_power_of_2(x.shape[1]))
    grid = (triton.cdiv(plan.num_rows, _BLOCK_ROWS), triton.cdiv(x.shape[1], block_h))
    _gather_kernel[grid](
        x, plan.pair_of_row, out, plan.row_of_pair.shape[0], plan.num_rows, x.stride(0), H=x.shape[1], TOPK=topk,
        BLOCK_R=_BLOCK_ROWS, BLOCK_H=block_h, PERMUTE=permute, num_warps=8, **pdl_options(x.device),
    )  # fmt: skip
    return out


def combine_rows(rows: Tensor, plan: ExpertPlan, topk: int, has_shared: bool) -> Tensor:
    """Sums [T, H] of the rows [R, H] of each token."""
    num_pairs, hidden = plan.row_of_pair.shape[0], rows.shape[1]
    out = rows.new_empty((num_pairs // topk, hidden))
    block_h = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(out.shape[0], triton.cdiv(hidden, block_h))](
        rows, plan.row_of_pair, out, num_pairs, H=hidden, TOPK=topk, SHARED=has_shared, BLOCK_H=block_h,
        **pdl_options(rows.device),
    )  # fmt: skip
    return out
