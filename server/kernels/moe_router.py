"""The router on the GPU: partial products over shares of the hidden width, then sum, sigmoid and an exact top-k per row.

A bf16 activation times an fp32 weight is exact on the tensor cores when the weight is cut into three bf16 numbers of eight
mantissa bits each; what is rounded is the fp32 sum. Up to four tokens, and other activation dtypes, multiply in fp32.
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
from server.kernels.launch import pdl_options, wait_for_inputs

_TINY, _FEW = 4, 128  # up to how many tokens the cores do without the matrix unit, and programs hold weights in registers


@dataclass(frozen=True)
class RouterConfig:
    """How the product with the router's weight is cut.

    Attributes:
        block_t: tokens per program; fewer than 16 are multiplied without the matrix unit.
        block_e: experts per program.
        block_k: inner dimension per step.
        num_steps: steps of a program, whose sum is one share; 0 for one step with the weights in registers.
        num_warps: of a program.
        num_stages: steps in flight.
    """

    block_t: int
    block_e: int
    block_k: int
    num_steps: int = 0
    num_warps: int = 4
    num_stages: int = 1

    def options(self) -> dict[str, int]:
        """Constants and launch options of a kernel."""
        return {
            "BLOCK_T": self.block_t,
            "BLOCK_E": self.block_e,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@triton.jit
def _cut(b_w):
    """fp32 as a sum of three bf16 numbers: high, middle, low."""
    b_high = b_w.to(tl.bfloat16)
    b_rest = b_w - b_high.to(tl.float32)
    b_middle = b_rest.to(tl.bfloat16)
    return b_high, b_middle, (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)


@direct_launch
@triton.jit(do_not_specialize=["num_tokens"])
def _few_logits_kernel(
    x_ptr, weight_ptr, partial_ptr, num_tokens, stride_x,
    H: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, expert tiles, shares of the width); partial is [shares, T, E] fp32.

    Weights are read and cut before the wait: no kernel writes them.
    """
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    o_k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_t, m_e = o_t < num_tokens, o_e < E
    b_w = tl.load(weight_ptr + o_e[:, None] * H + o_k[None, :], mask=m_e[:, None] & (o_k < H)[None, :], other=0.0)
    p_x = x_ptr + o_t.to(tl.int64)[:, None] * stride_x + o_k[None, :]
    m_x = m_t[:, None] & (o_k < H)[None, :]
    acc = tl.zeros([BLOCK_E, BLOCK_T], dtype=tl.float32)
    if BLOCK_T < 16:
        wait_for_inputs(PDL)
        b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
        acc = tl.trans(tl.sum(b_x[:, None, :] * b_w[None, :, :], 2))
    elif x_ptr.dtype.element_ty == tl.bfloat16:
        b_high, b_middle, b_low = _cut(b_w)
        wait_for_inputs(PDL)
        b_x = tl.trans(tl.load(p_x, mask=m_x, other=0.0))
        acc = tl.dot(b_low, b_x, acc)
        acc = tl.dot(b_middle, b_x, acc)
        acc = tl.dot(b_high, b_x, acc)
    else:
        wait_for_inputs(PDL)
        acc = tl.dot(b_w, tl.trans(tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)), acc, input_precision="ieee")
    o_out = (tl.program_id(2).to(tl.int64) * num_tokens + o_t)[None, :] * E + o_e[:, None]
    tl.store(partial_ptr + o_out, acc, mask=m_t[None, :] & m_e[:, None])


@direct_launch
@triton.jit
def _cut_kernel(weight_ptr, pieces_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (blocks,); pieces is [3, SIZE]: what `_cut` says."""
    o_w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_w = o_w < SIZE
    b_high, b_middle, b_low = _cut(tl.load(weight_ptr + o_w, mask=m_w, other=0.0))
    wait_for_inputs(PDL)
    tl.store(pieces_ptr + o_w, b_high, mask=m_w)
    tl.store(pieces_ptr + SIZE + o_w, b_middle, mask=m_w)
    tl.store(pieces_ptr + 2 * SIZE + o_w, b_low, mask=m_w)


@direct_launch
@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def _logits_kernel(
    x_ptr, pieces_ptr, partial_ptr, num_tokens, num_steps, stride_x,
    H: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `_few_logits_kernel`, with shares of several steps and the weight in three pieces [3, E, H].

    Each piece has its sum, so that the products of a step follow each other without a wait.
    """
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    m_t, m_e = o_t < num_tokens, o_e < E
    begin = tl.program_id(2) * (num_steps * BLOCK_K)
    acc_high = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    acc_middle = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    acc_low = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    p_x = x_ptr + o_t.to(tl.int64)[:, None] * stride_x
    p_high = pieces_ptr + o_e[None, :] * H
    wait_for_inputs(PDL)
    for i in range(num_steps):
        o_k = begin + i * BLOCK_K + tl.arange(0, BLOCK_K)
        m_k = o_k < H
        m_w = m_k[:, None] & m_e[None, :]
        b_x = tl.load(p_x + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_low = tl.load(p_high + 2 * E * H + o_k[:, None], mask=m_w, other=0.0)
        b_middle = tl.load(p_high + E * H + o_k[:, None], mask=m_w, other=0.0)
        b_high = tl.load(p_high + o_k[:, None], mask=m_w, other=0.0)
        acc_low = tl.dot(b_x, b_low, acc_low)
        acc_middle = tl.dot(b_x, b_middle, acc_middle)
        acc_high = tl.dot(b_x, b_high, acc_high)
    o_out = (tl.program_id(2).to(tl.int64) * num_tokens + o_t)[:, None] * E + o_e[None, :]
    tl.store(partial_ptr + o_out, acc_low + acc_middle + acc_high, mask=m_t[:, None] & m_e[None, :])


@triton.jit
def _choose(scores, choice, o_e, m_e, TOPK: tl.constexpr, BLOCK_K: tl.constexpr):
    """(experts, scores) of the TOPK largest of choice [T, E], largest first, ties to the lower id: both [T, BLOCK_K].

    NaN ranks as -inf, -0.0 as 0.0.
    """
    T: tl.constexpr = choice.shape[0]
    choice = tl.where(choice == choice, choice, float("-inf"))
    choice = tl.where(choice == 0.0, 0.0, choice)
    bits = choice.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    lowest = -0x80000000  # below the key of -inf
    keys = tl.where(m_e[None, :], keys, lowest)
    score_bits = scores.to(tl.int32, bitcast=True)
    o_k = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([T, BLOCK_K], dtype=tl.int32)
    chosen_bits = tl.zeros([T, BLOCK_K], dtype=tl.int32)
    for j in tl.static_range(TOPK):
        best = tl.max(keys, 1)[:, None]
        expert = tl.min(tl.where(keys == best, o_e[None, :], 0x7FFFFFFF), 1)[:, None]
        is_best = o_e[None, :] == expert
        chosen = tl.where(o_k == j, expert, chosen)
        chosen_bits = tl.where(o_k == j, tl.sum(tl.where(is_best, score_bits, 0), 1)[:, None], chosen_bits)
        keys = tl.where(is_best, lowest, keys)
    return chosen, chosen_bits.to(tl.float32, bitcast=True)


@direct_launch
@triton.jit(do_not_specialize=["num_tokens", "num_shares"])
def _choose_kernel(
    partial_ptr, bias_ptr, ids_ptr, weights_ptr, num_tokens, num_shares,
    E: tl.constexpr, TOPK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles,). AT_ONCE reads all shares of one token together, else a tile of tokens goes share by share."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    m_t, m_e = o_t < num_tokens, o_e < E
    bias = tl.load(bias_ptr + o_e, mask=m_e, other=0.0)
    wait_for_inputs(PDL)
    if AT_ONCE:
        o_s = tl.arange(0, BLOCK_S)
        p_partial = partial_ptr + (o_s.to(tl.int64) * num_tokens + tl.program_id(0))[:, None] * E + o_e[None, :]
        b_partial = tl.load(p_partial, mask=(o_s < num_shares)[:, None] & m_e[None, :], other=0.0)
        logits = tl.sum(b_partial, 0)[None, :]
    else:
        p_partial = partial_ptr + o_t[:, None] * E + o_e[None, :]
        logits = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
        for s in tl.static_range(BLOCK_S):
            m_partial = (o_t < tl.where(s < num_shares, num_tokens, 0))[:, None] & m_e[None, :]
            logits += tl.load(p_partial + tl.cast(s, tl.int64) * num_tokens * E, mask=m_partial, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    chosen, chosen_scores = _choose(scores, scores + bias[None, :], o_e, m_e, TOPK, BLOCK_K)
    o_k = tl.arange(0, BLOCK_K)
    o_out = o_t[:, None] * TOPK + o_k[None, :]
    m_out = m_t[:, None] & (o_k < TOPK)[None, :]
    tl.store(ids_ptr + o_out, chosen, mask=m_out)
    tl.store(weights_ptr + o_out, chosen_scores / tl.sum(chosen_scores, 1)[:, None], mask=m_out)


def router_config(num_tokens: int, num_experts: int, hidden: int, is_bf16: bool) -> RouterConfig:
    """Tiles for a number of tokens: about one program per multiprocessor of a large GPU."""
    if num_tokens <= _TINY:
        return RouterConfig(next_power_of_2(num_tokens), 4, 1024)
    block_e = min(64, max(16, next_power_of_2(num_experts)))
    if num_tokens <= _FEW or not is_bf16:
        return RouterConfig(min(64, max(16, next_power_of_2(num_tokens))), block_e, 128)
    block_t = 64 if num_tokens <= 256 else 128 if num_tokens <= 2048 else 256
    steps = cdiv(hidden, 64)
    shares = max(1, 128 // (cdiv(num_tokens, block_t) * cdiv(num_experts, block_e)))
    return RouterConfig(block_t, block_e, 64, cdiv(steps, min(steps, shares)), min(8, block_t // 16), 3)


def partial_logits(x: Tensor, router_weight: Tensor, config: RouterConfig) -> Tensor:
    """[shares, T, E] fp32, whose sum over shares is x [T, H] times router_weight [E, H]."""
    (num_tokens, hidden), num_experts = x.shape, router_weight.shape[0]
    num_shares = cdiv(hidden, config.block_k * max(1, config.num_steps))
    grid = cdiv(num_tokens, config.block_t), cdiv(num_experts, config.block_e), num_shares
    partial = torch.empty((num_shares, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    pdl = pdl_options(x.device)
    constants = {"H": hidden, "E": num_experts, **config.options(), **pdl}
    if config.num_steps == 0:
        _few_logits_kernel[grid](x, router_weight, partial, num_tokens, x.stride(0), **constants)
        return partial
    pieces = x.new_empty((3, num_experts, hidden))
    size = num_experts * hidden
    _cut_kernel[(cdiv(size, 2048),)](router_weight, pieces, SIZE=size, BLOCK=2048, **pdl)
    _logits_kernel[grid](x, pieces, partial, num_tokens, config.num_steps, x.stride(0), **constants)
    return partial


def choose(partial: Tensor, correction_bias: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Expert ids and weights [T, topk] as `route` says, of the sum of partial [shares, T, E]."""
    num_shares, num_tokens, num_experts = partial.shape
    expert_ids = torch.empty((num_tokens, topk), dtype=torch.int32, device=partial.device)
    weights = torch.empty((num_tokens, topk), dtype=torch.float32, device=partial.device)
    at_once = num_shares > 16
    block_t = 1 if at_once else 4
    _choose_kernel[(cdiv(num_tokens, block_t),)](
        partial, correction_bias, expert_ids, weights, num_tokens, num_shares, E=num_experts, TOPK=topk, BLOCK_T=block_t,
        BLOCK_S=next_power_of_2(num_shares), BLOCK_E=next_power_of_2(num_experts),
        BLOCK_K=next_power_of_2(topk), AT_ONCE=at_once, num_warps=4, **pdl_options(partial.device),
    )  # fmt: skip
    return expert_ids, weights


def route_triton(x: Tensor, router_weight: Tensor, correction_bias: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """As `route`, in two or three launches that read nothing back."""
    num_tokens, hidden = x.shape
    if num_tokens == 0:
        return x.new_empty((0, topk), dtype=torch.int32), x.new_empty((0, topk), dtype=torch.float32)
    config = router_config(num_tokens, router_weight.shape[0], hidden, x.dtype == torch.bfloat16)
    return choose(partial_logits(x, router_weight, config), correction_bias, topk)
