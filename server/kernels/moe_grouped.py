"""Grouped products over sorted rows in plain Triton: any width, dtype and device.

A program multiplies one tile of an expert's rows with one tile of its weight. The first product ends in the activation, times
the weight of the choice, so that a token's result is the plain sum of its rows of the second.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv
from server.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_for_inputs_only
from server.kernels.moe_configs import TileConfig
from server.kernels.moe_plan import ExpertPlan
from server.kernels.moe_tiles import Activation, Weight, dot_rows, stored, swiglu, weight_tile


@direct_launch
@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_ptr, w_ptr, scale_ptr, pair_of_row_ptr, row_weights_ptr, tiles_ptr, num_tiles_ptr, act_ptr, num_pairs,
    alpha, beta, limit, stride_x,
    H: tl.constexpr, WIDTH: tl.constexpr, TOPK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, MXFP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the width, bound of row tiles); x is gathered, act is [rows, I]."""
    wait_for_inputs_only(PDL)
    if tl.program_id(1) >= tl.load(num_tiles_ptr):
        return
    p_tile = tiles_ptr + tl.program_id(1) * 4
    expert = tl.load(p_tile).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < tl.load(p_tile + 2)
    o_row = tl.load(p_tile + 1) + o_m
    b_pair = tl.load(pair_of_row_ptr + o_row, mask=m_m, other=0)
    b_token = tl.where(b_pair < num_pairs, b_pair // TOPK, b_pair - num_pairs)
    p_x = x_ptr + b_token.to(tl.int64)[:, None] * stride_x
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < WIDTH
    o_gate = expert * (2 * WIDTH) + o_n
    acc_gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for begin in range(0, H, BLOCK_K):
        o_k = begin + tl.arange(0, BLOCK_K)
        b_gate = weight_tile(w_ptr, scale_ptr, o_gate, m_n, begin, H, BLOCK_K, MXFP8, x_ptr.dtype.element_ty)
        b_up = weight_tile(w_ptr, scale_ptr, o_gate + WIDTH, m_n, begin, H, BLOCK_K, MXFP8, x_ptr.dtype.element_ty)
        b_x = tl.load(p_x + o_k[None, :], mask=m_m[:, None] & (o_k < H)[None, :], other=0.0)
        acc_gate = dot_rows(b_x, b_gate, acc_gate)
        acc_up = dot_rows(b_x, b_up, acc_up)
    start_next(PDL)
    b_weight = tl.load(row_weights_ptr + o_row, mask=m_m, other=0.0)
    b_act = swiglu(acc_gate, acc_up, alpha, beta, limit) * b_weight[:, None]
    p_act = act_ptr + o_row.to(tl.int64)[:, None] * WIDTH + o_n[None, :]
    tl.store(p_act, b_act.to(act_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@direct_launch
@triton.jit
def _down_kernel(
    act_ptr, w_ptr, scale_ptr, tiles_ptr, num_tiles_ptr, out_ptr,
    H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MXFP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the hidden width, bound of row tiles); act is [rows, I], out is [rows, H]."""
    wait_for_inputs(PDL)
    if tl.program_id(1) >= tl.load(num_tiles_ptr):
        return
    p_tile = tiles_ptr + tl.program_id(1) * 4
    expert = tl.load(p_tile).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < tl.load(p_tile + 2)
    o_row = (tl.load(p_tile + 1) + o_m).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < H
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for begin in range(0, WIDTH, BLOCK_K):
        o_k = begin + tl.arange(0, BLOCK_K)
        b_w = weight_tile(w_ptr, scale_ptr, expert * H + o_n, m_n, begin, WIDTH, BLOCK_K, MXFP8, act_ptr.dtype.element_ty)
        b_a = tl.load(act_ptr + o_row[:, None] * WIDTH + o_k[None, :], mask=m_m[:, None] & (o_k < WIDTH)[None, :], other=0.0)
        acc = dot_rows(b_a, b_w, acc)
    tl.store(out_ptr + o_row[:, None] * H + o_n[None, :], acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def grouped_gate_up(
    x: Tensor, w13: Weight, plan: ExpertPlan, topk: int, activation: Activation, block_m: int, config: TileConfig
) -> Tensor:
    """Activations [R, width] of x [T, H] in expert order, times the weights of their choices; tiles of `block_m` rows."""
    width, hidden = w13.shape[1] // 2, w13.shape[2]
    act = x.new_empty((plan.num_rows, width))
    values, scales, is_mxfp8 = stored(w13)
    _gate_up_kernel[(cdiv(width, config.block_n), plan.max_tiles)](
        x, values, scales, plan.pair_of_row, plan.row_weights, plan.tiles, plan.num_tiles, act, plan.row_of_pair.shape[0],
        activation.alpha, activation.beta, activation.limit, x.stride(0),
        H=hidden, WIDTH=width, TOPK=topk, BLOCK_M=block_m, MXFP8=is_mxfp8, **config.options(), **pdl_options(x.device),
    )  # fmt: skip
    return act


def grouped_down(act: Tensor, w2: Weight, plan: ExpertPlan, block_m: int, config: TileConfig) -> Tensor:
    """Results [R, H] of activations [R, I] in expert order; tiles of `block_m` rows."""
    hidden, width = w2.shape[1], w2.shape[2]
    out = act.new_empty((plan.num_rows, hidden))
    values, scales, is_mxfp8 = stored(w2)
    _down_kernel[(cdiv(hidden, config.block_n), plan.max_tiles)](
        act, values, scales, plan.tiles, plan.num_tiles, out, H=hidden, WIDTH=width, BLOCK_M=block_m, MXFP8=is_mxfp8,
        **config.options(), **pdl_options(act.device),
    )  # fmt: skip
    return out
