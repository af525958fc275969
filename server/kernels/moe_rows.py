"""Copying tokens into expert order, and summing what the experts gave back per token."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv, next_power_of_2
from server.kernels.launch import pdl_options, wait_for_inputs
from server.kernels.moe_plan import ExpertPlan, empty_plan, histogram_size, list_tiles, plan_experts

_MAX_PAIRS_AT_ONCE = 2048  # up to here one launch sorts and copies


@triton.jit
def _permuted(b_x):
    """Columns [R, C] in the order in which MXFP8 weights enter a product, see `moe_hopper`.

    Bits of a column within 128, high to low: c1 c0 h s1 s0 j1 j0; the same bits as they are stored: h s1 s0 j0 c1 c0 j1.
    """
    R: tl.constexpr = b_x.shape[0]
    C: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [R, C // 128, 4, 8, 2, 2]), (0, 1, 3, 5, 2, 4)), [R, C])


@triton.jit
def _load_token(x_ptr, token, i_h, stride_x, H: tl.constexpr, BLOCK_H: tl.constexpr, PERMUTE: tl.constexpr):
    """Columns [1, BLOCK_H] of a token, in the order of `_permuted` if PERMUTE."""
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    b_x = tl.load(x_ptr + token.to(tl.int64) * stride_x + o_h, mask=o_h < H)
    if PERMUTE:
        b_x = _permuted(b_x)
    return b_x


@triton.jit
def _store_rows(
    out_ptr, b_x, b_row, m_row, shared_row, i_h, H: tl.constexpr, SHARED: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Write columns [1, BLOCK_H] to those of the rows [K] that `m_row` says, and to the shared expert's."""
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    p_out = out_ptr + b_row.to(tl.int64)[:, None] * H + o_h
    tl.store(p_out, tl.broadcast_to(b_x, p_out.shape), mask=m_row[:, None] & (o_h < H))
    if SHARED:
        tl.store(out_ptr + shared_row.to(tl.int64) * H + o_h, b_x, mask=o_h < H)


@direct_launch
@triton.jit(do_not_specialize=["num_pairs"])
def _copy_kernel(
    x_ptr, row_of_pair_ptr, out_ptr, num_pairs, stride_x,
    H: tl.constexpr, TOPK: tl.constexpr, SHARED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    PERMUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T * tiles of the width,): copies a token to each of its rows."""
    TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token, i_h = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < TOPK
    wait_for_inputs(PDL)
    b_x = _load_token(x_ptr, token, i_h, stride_x, H, BLOCK_H, PERMUTE)
    b_row = tl.load(row_of_pair_ptr + token * TOPK + o_k, mask=m_k, other=0)
    _store_rows(out_ptr, b_x, b_row, m_k, num_pairs + token, i_h, H, SHARED, BLOCK_H)


@direct_launch
@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _sort_and_copy_kernel(
    x_ptr, ids_ptr, weights_ptr, pair_of_row_ptr, row_of_pair_ptr, row_weights_ptr, tiles_ptr, num_tiles_ptr, out_ptr,
    num_pairs, num_tokens, scaling, stride_x,
    H: tl.constexpr, E: tl.constexpr, TOPK: tl.constexpr, SHARED: tl.constexpr, STEP_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    PERMUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the width, T + 1): plan and rows of up to BLOCK_P pairs.

    A program finds its token's rows by comparing the token's choices with all others; behind the tokens, one lists tiles.
    """
    i_h, token = tl.program_id(0), tl.program_id(1)
    o_p, o_k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    m_p, m_k = o_p < num_pairs, o_k < TOPK
    wait_for_inputs(PDL)
    if token == num_tokens:
        if i_h == 0:
            b_rows = tl.histogram(tl.load(ids_ptr + o_p, mask=m_p, other=0), BLOCK_E, mask=m_p)
            list_tiles(b_rows, tiles_ptr, num_tiles_ptr, num_pairs, num_tokens, E, SHARED, STEP_ROWS, MAX_ROWS)
        return
    b_x = _load_token(x_ptr, token, i_h, stride_x, H, BLOCK_H, PERMUTE)
    o_pair = token * TOPK + o_k
    b_own = tl.load(ids_ptr + o_pair[:, None], mask=m_k[:, None], other=0)
    b_ids = tl.load(ids_ptr + o_p[None, :], mask=m_p[None, :], other=E)
    is_before = (b_ids < b_own) | ((b_ids == b_own) & (o_p[None, :] < o_pair[:, None]))
    b_row = tl.sum(is_before.to(tl.int32), 1)
    shared_row = num_pairs + token
    _store_rows(out_ptr, b_x, b_row, m_k, shared_row, i_h, H, SHARED, BLOCK_H)
    if i_h == 0:
        tl.store(row_of_pair_ptr + o_pair, b_row, mask=m_k)
        tl.store(pair_of_row_ptr + b_row, o_pair, mask=m_k)
        tl.store(row_weights_ptr + b_row, tl.load(weights_ptr + o_pair, mask=m_k, other=0.0) * scaling, mask=m_k)
        if SHARED:
            tl.store(pair_of_row_ptr + shared_row, shared_row)
            tl.store(row_weights_ptr + shared_row, 1.0)


@direct_launch
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


def sort_rows(
    x: Tensor, expert_ids: Tensor, weights: Tensor, scaling: float, num_experts: int, has_shared: bool, step_rows: int,
    max_rows: int, permute: bool,
) -> tuple[ExpertPlan, Tensor]:  # fmt: skip
    """As `plan_experts`, and the rows [R, H] of x [T, H] in expert order, with permuted columns if `permute`."""
    if expert_ids.numel() <= _MAX_PAIRS_AT_ONCE:
        return _sort_and_copy(x, expert_ids, weights, scaling, num_experts, has_shared, step_rows, max_rows, permute)
    plan = plan_experts(expert_ids, weights, scaling, num_experts, has_shared, step_rows, max_rows)
    (num_tokens, topk), hidden = expert_ids.shape, x.shape[1]
    rows = x.new_empty((plan.num_rows, hidden))
    block_h = min(2048, next_power_of_2(hidden))
    _copy_kernel[(num_tokens * cdiv(hidden, block_h),)](
        x, plan.row_of_pair, rows, num_tokens * topk, x.stride(0), H=hidden, TOPK=topk, SHARED=has_shared,
        BLOCK_K=next_power_of_2(topk), BLOCK_H=block_h, PERMUTE=permute, **pdl_options(x.device),
    )  # fmt: skip
    return plan, rows


def _sort_and_copy(
    x: Tensor, expert_ids: Tensor, weights: Tensor, scaling: float, num_experts: int, has_shared: bool, step_rows: int,
    max_rows: int, permute: bool,
) -> tuple[ExpertPlan, Tensor]:  # fmt: skip
    (num_tokens, topk), hidden, num_pairs = expert_ids.shape, x.shape[1], expert_ids.numel()
    plan = empty_plan(expert_ids, num_experts, has_shared, step_rows)
    rows = x.new_empty((plan.num_rows, hidden))
    block_h, num_warps = (1024, 1) if num_pairs <= 512 else (2048, 8)
    block_h = min(block_h, next_power_of_2(hidden))
    _sort_and_copy_kernel[(cdiv(hidden, block_h), num_tokens + 1)](
        x, expert_ids, weights, plan.pair_of_row, plan.row_of_pair, plan.row_weights, plan.tiles, plan.num_tiles, rows,
        num_pairs, num_tokens, scaling, x.stride(0), H=hidden, E=num_experts, TOPK=topk, SHARED=has_shared,
        STEP_ROWS=step_rows, MAX_ROWS=max_rows, BLOCK_E=histogram_size(num_experts),
        BLOCK_P=max(128, next_power_of_2(num_pairs)), BLOCK_K=next_power_of_2(topk), BLOCK_H=block_h,
        PERMUTE=permute, num_warps=num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return plan, rows


def combine_rows(rows: Tensor, plan: ExpertPlan, topk: int, has_shared: bool) -> Tensor:
    """Sums [T, H] of the rows [R, H] of each token."""
    num_pairs, hidden = plan.row_of_pair.shape[0], rows.shape[1]
    out = rows.new_empty((num_pairs // topk, hidden))
    block_h = min(1024, next_power_of_2(hidden))
    _combine_kernel[(out.shape[0], cdiv(hidden, block_h))](
        rows, plan.row_of_pair, out, num_pairs, H=hidden, TOPK=topk, SHARED=has_shared, BLOCK_H=block_h,
        **pdl_options(rows.device),
    )  # fmt: skip
    return out
