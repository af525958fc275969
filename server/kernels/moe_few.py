"""Experts of a few tokens (up to 16): no sorting, every tile of a product holds all tokens.

Each expert that a token chose is multiplied with all tokens, which costs nothing while reading weights is what takes time; rows
of tokens that did not choose it become zeros. The weight of a choice goes into the activation, so that the second product, over
(expert, width) as one long inner dimension, is the weighted sum already: two launches, nothing added up in between.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv, next_power_of_2
from server.kernels.launch import pdl_options, start_next, wait_for_inputs, wait_for_inputs_only
from server.kernels.moe_configs import TileConfig
from server.kernels.moe_tiles import Activation, Weight, dot_rows, stored, swiglu, weight_tile

MAX_TOKENS = 16
MAX_PAIRS = 64


@triton.jit
def _list_expert(experts_ptr, slots_ptr, count_ptr, b_ids, o_p, slot, expert, num_pairs, num_slots):
    """Write this slot's entry of the list of distinct experts: slots in ascending order."""
    seen = (b_ids[:, None] == b_ids[None, :]) & (o_p[None, :] < o_p[:, None])
    is_first = (tl.sum(seen.to(tl.int32), 1) == 0) & (o_p < num_pairs)
    rank = tl.sum((is_first & (o_p < slot)).to(tl.int32), 0)
    is_new = (slot == num_pairs) | (tl.sum((is_first & (o_p == slot)).to(tl.int32), 0) > 0)
    tl.store(slots_ptr + rank, slot, mask=is_new)
    tl.store(experts_ptr + rank, expert, mask=is_new)
    tl.store(count_ptr, rank + is_new.to(tl.int32), mask=slot == num_slots - 1)


@direct_launch
@triton.jit(do_not_specialize=["num_tokens"])
def _few_gate_up_kernel(
    x_ptr, w_ptr, scale_ptr, ids_ptr, weights_ptr, act_ptr, experts_ptr, slots_ptr, count_ptr, num_tokens,
    alpha, beta, limit, scaling, stride_x,
    H: tl.constexpr, WIDTH: tl.constexpr, TOPK: tl.constexpr, SHARED_EXPERT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MXFP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the width, slots); a slot is a (token, choice) pair or, last, the shared expert. act is [slots, T, I]."""
    slot = tl.program_id(1)
    num_pairs = num_tokens * TOPK
    o_p = tl.arange(0, BLOCK_P)
    o_t = tl.arange(0, BLOCK_T)
    o_j = tl.arange(0, BLOCK_J)
    m_t = o_t < num_tokens
    wait_for_inputs_only(PDL)
    b_ids = tl.load(ids_ptr + o_p, mask=o_p < num_pairs, other=-1)
    expert = tl.load(ids_ptr + slot, mask=slot < num_pairs, other=SHARED_EXPERT)
    if tl.program_id(0) == 0:
        _list_expert(experts_ptr, slots_ptr, count_ptr, b_ids, o_p, slot, expert, num_pairs, tl.num_programs(1))
    if (slot < num_pairs) & (tl.sum(((b_ids == expert) & (o_p < slot)).to(tl.int32), 0) > 0):
        return
    o_choice = o_t[:, None] * TOPK + o_j[None, :]
    m_choice = m_t[:, None] & (o_j < TOPK)[None, :]
    is_chosen = tl.load(ids_ptr + o_choice, mask=m_choice, other=-1) == expert
    weight = tl.sum(tl.where(is_chosen, tl.load(weights_ptr + o_choice, mask=m_choice, other=0.0), 0.0), 1) * scaling
    is_row = tl.sum(is_chosen.to(tl.int32), 1) > 0
    if slot == num_pairs:
        weight = tl.full([BLOCK_T], 1.0, tl.float32)
        is_row = m_t
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < WIDTH
    o_gate = expert.to(tl.int64) * (2 * WIDTH) + o_n
    acc_gate = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for begin in range(0, H, BLOCK_K):
        o_k = begin + tl.arange(0, BLOCK_K)
        m_x = m_t[:, None]
        if H % BLOCK_K != 0:
            m_x = m_x & (o_k < H)[None, :]
        b_gate = weight_tile(w_ptr, scale_ptr, o_gate, m_n, begin, H, BLOCK_K, MXFP8, x_ptr.dtype.element_ty)
        b_up = weight_tile(w_ptr, scale_ptr, o_gate + WIDTH, m_n, begin, H, BLOCK_K, MXFP8, x_ptr.dtype.element_ty)
        b_x = tl.load(x_ptr + o_t[:, None] * stride_x + o_k[None, :], mask=m_x, other=0.0)
        acc_gate = dot_rows(b_x, b_gate, acc_gate)
        acc_up = dot_rows(b_x, b_up, acc_up)
    start_next(PDL)
    b_act = tl.where(is_row[:, None], swiglu(acc_gate, acc_up, alpha, beta, limit) * weight[:, None], 0.0)
    p_act = act_ptr + (slot * num_tokens + o_t)[:, None] * WIDTH + o_n[None, :]
    tl.store(p_act, b_act.to(act_ptr.dtype.element_ty), mask=m_t[:, None] & m_n[None, :])


@direct_launch
@triton.jit(do_not_specialize=["num_tokens"])
def _few_down_kernel(
    act_ptr, w_ptr, scale_ptr, experts_ptr, slots_ptr, count_ptr, out_ptr, num_tokens,
    H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MXFP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the hidden width,); out is [T, H]."""
    STEPS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    o_t = tl.arange(0, BLOCK_T)
    m_t = o_t < num_tokens
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < H
    acc = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    wait_for_inputs(PDL)
    for i in range(tl.load(count_ptr) * STEPS):
        begin = i % STEPS * BLOCK_K
        slot = tl.load(slots_ptr + i // STEPS)
        expert = tl.load(experts_ptr + i // STEPS)
        o_k = begin + tl.arange(0, BLOCK_K)
        m_a = m_t[:, None]
        if WIDTH % BLOCK_K != 0:
            m_a = m_a & (o_k < WIDTH)[None, :]
        o_row = expert.to(tl.int64) * H + o_n
        b_w = weight_tile(w_ptr, scale_ptr, o_row, m_n, begin, WIDTH, BLOCK_K, MXFP8, act_ptr.dtype.element_ty)
        b_a = tl.load(act_ptr + (slot * num_tokens + o_t)[:, None] * WIDTH + o_k[None, :], mask=m_a, other=0.0)
        acc = dot_rows(b_a, b_w, acc)
    tl.store(out_ptr + o_t[:, None] * H + o_n[None, :], acc.to(out_ptr.dtype.element_ty), mask=m_t[:, None] & m_n[None, :])


@dataclass(frozen=True)
class FewActivations:
    """What the first product leaves to the second.

    Attributes:
        act: [slots, T, width]: activations times weights, zero for tokens that did not choose a slot's expert.
        experts: [slots] int32: distinct experts, in the order of their slots.
        slots: [slots] int32: slots of these experts.
        count: [1] int32: how many these are.
    """

    act: Tensor
    experts: Tensor
    slots: Tensor
    count: Tensor


def few_gate_up(
    x: Tensor, w13: Weight, expert_ids: Tensor, weights: Tensor, activation: Activation, scaling: float, has_shared: bool,
    config: TileConfig,
) -> FewActivations:  # fmt: skip
    """The first product of up to MAX_TOKENS tokens and MAX_PAIRS choices."""
    num_tokens, topk = expert_ids.shape
    num_experts, width, hidden = w13.shape[0], w13.shape[1] // 2, w13.shape[2]
    num_slots = num_tokens * topk + has_shared
    lists = torch.empty((2 * num_slots + 1,), dtype=torch.int32, device=x.device)
    found = FewActivations(
        act=x.new_empty((num_slots, num_tokens, width)),
        experts=lists[:num_slots],
        slots=lists[num_slots : 2 * num_slots],
        count=lists[2 * num_slots :],
    )
    values, scales, is_mxfp8 = stored(w13)
    _few_gate_up_kernel[(cdiv(width, config.block_n), num_slots)](
        x, values, scales, expert_ids, weights, found.act, found.experts, found.slots, found.count, num_tokens,
        activation.alpha, activation.beta, activation.limit, scaling, x.stride(0),
        H=hidden, WIDTH=width, TOPK=topk, SHARED_EXPERT=num_experts - 1, BLOCK_T=MAX_TOKENS, BLOCK_P=MAX_PAIRS,
        BLOCK_J=next_power_of_2(topk), MXFP8=is_mxfp8, **config.options(), **pdl_options(x.device),
    )  # fmt: skip
    return found


def few_down(found: FewActivations, w2: Weight, config: TileConfig) -> Tensor:
    """The second product, summed over experts: [T, H]."""
    num_tokens, hidden, width = found.act.shape[1], w2.shape[1], w2.shape[2]
    out = found.act.new_empty((num_tokens, hidden))
    values, scales, is_mxfp8 = stored(w2)
    _few_down_kernel[(cdiv(hidden, config.block_n),)](
        found.act, values, scales, found.experts, found.slots, found.count, out, num_tokens,
        H=hidden, WIDTH=width, BLOCK_T=MAX_TOKENS, MXFP8=is_mxfp8, **config.options(), **pdl_options(out.device),
    )  # fmt: skip
    return out
