"""The router on the GPU: partial products over shares of the hidden width, then sum, sigmoid and an exact top-k per row.

A bf16 activation times an fp32 weight is exact on the tensor cores when the weight is cut into three bf16 numbers of eight
mantissa bits each; what is rounded is the fp32 sum. Other activation dtypes multiply in fp32.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.launch import pdl_options, wait_for_inputs

_BLOCK_K = 64
_FEW_TOKENS = 16
_MAX_PROGRAMS = 512  # the hidden width is cut into fewer shares where token tiles alone fill the device


@triton.jit
def _dot_exact(b_x, b_w, acc):
    """Add x [T, K] times fp32 w [E, K] to `acc`."""
    if b_x.dtype == tl.bfloat16:
        b_high = b_w.to(tl.bfloat16)
        b_rest = b_w - b_high.to(tl.float32)
        b_middle = b_rest.to(tl.bfloat16)
        b_low = (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(b_x, tl.trans(b_low), acc)
        acc = tl.dot(b_x, tl.trans(b_middle), acc)
        acc = tl.dot(b_x, tl.trans(b_high), acc)
    else:
        acc = tl.dot(b_x.to(tl.float32), tl.trans(b_w), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def _partial_logits_kernel(
    x_ptr, weight_ptr, partial_ptr, num_tokens, num_steps, stride_x,
    H: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, expert tiles, shares of the width); partial is [shares, T, E] fp32."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    m_t, m_e = o_t < num_tokens, o_e < E
    begin = tl.program_id(2) * (num_steps * BLOCK_K)
    acc = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    p_x = x_ptr + o_t.to(tl.int64)[:, None] * stride_x
    wait_for_inputs(PDL)
    for i in range(num_steps):
        o_k = begin + i * BLOCK_K + tl.arange(0, BLOCK_K)
        m_k = o_k < H
        b_w = tl.load(weight_ptr + o_e[:, None] * H + o_k[None, :], mask=m_e[:, None] & m_k[None, :], other=0.0)
        b_x = tl.load(p_x + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
        acc = _dot_exact(b_x, b_w, acc)
    o_out = (tl.program_id(2).to(tl.int64) * num_tokens + o_t)[:, None] * E + o_e[None, :]
    tl.store(partial_ptr + o_out, acc, mask=m_t[:, None] & m_e[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_shares"])
def _choose_kernel(
    partial_ptr, bias_ptr, ids_ptr, weights_ptr, num_tokens, num_shares,
    E: tl.constexpr, TOPK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,). Keys order by (choice score descending, id ascending) and all differ, so the top-k is exact."""
    token = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < E
    o_s = tl.arange(0, BLOCK_S)
    wait_for_inputs(PDL)
    p_partial = partial_ptr + (o_s.to(tl.int64)[:, None] * num_tokens + token) * E + o_e[None, :]
    logits = tl.sum(tl.load(p_partial, mask=(o_s < num_shares)[:, None] & m_e[None, :], other=0.0), 0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores + tl.load(bias_ptr + o_e, mask=m_e, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))
    choice = tl.where(choice == 0.0, 0.0, choice)  # -0.0 and 0.0 tie
    bits = choice.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    keys = (ordered << 32) | (0x7FFFFFFF - o_e).to(tl.int64)
    lowest = tl.full([BLOCK_E], -0x8000000000000000, tl.int64)
    keys = tl.where(m_e, keys, lowest)
    o_k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], dtype=tl.int32)
    chosen_scores = tl.zeros([BLOCK_K], dtype=tl.float32)
    for j in tl.static_range(TOPK):
        best = tl.max(keys, 0)
        is_best = keys == best
        chosen = tl.where(o_k == j, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
        chosen_scores = tl.where(o_k == j, tl.sum(tl.where(is_best, scores, 0.0), 0), chosen_scores)
        keys = tl.where(is_best, lowest, keys)
    tl.store(ids_ptr + token * TOPK + o_k, chosen, mask=o_k < TOPK)
    tl.store(weights_ptr + token * TOPK + o_k, chosen_scores / tl.sum(chosen_scores, 0), mask=o_k < TOPK)


def route_triton(x: Tensor, router_weight: Tensor, correction_bias: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """As `route`, in two launches that read nothing back."""
    num_tokens, hidden = x.shape
    num_experts = router_weight.shape[0]
    expert_ids = torch.empty((num_tokens, topk), dtype=torch.int32, device=x.device)
    weights = torch.empty((num_tokens, topk), dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return expert_ids, weights
    few = num_tokens <= _FEW_TOKENS
    block_t = 16 if few else 64
    block_e = min(64 if few else 128, max(16, triton.next_power_of_2(num_experts)))
    tiles = (triton.cdiv(num_tokens, block_t), triton.cdiv(num_experts, block_e))
    all_steps, num_steps = triton.cdiv(hidden, _BLOCK_K), 2
    while tiles[0] * tiles[1] * triton.cdiv(all_steps, num_steps) > _MAX_PROGRAMS and num_steps < all_steps:
        num_steps *= 2
    num_shares = triton.cdiv(all_steps, num_steps)
    partial = torch.empty((num_shares, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    pdl = pdl_options(x.device)
    _partial_logits_kernel[(*tiles, num_shares)](
        x, router_weight, partial, num_tokens, num_steps, x.stride(0), H=hidden, E=num_experts,
        BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=_BLOCK_K, num_warps=4, num_stages=2 if few else 3, **pdl,
    )  # fmt: skip
    _choose_kernel[(num_tokens,)](
        partial, correction_bias, expert_ids, weights, num_tokens, num_shares, E=num_experts, TOPK=topk,
        BLOCK_S=triton.next_power_of_2(num_shares), BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(topk), num_warps=4 if num_shares > 4 else 1, **pdl,
    )  # fmt: skip
    return expert_ids, weights
