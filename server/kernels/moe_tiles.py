"""What the grouped products share: tiles of weights, and the activation between the two products."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.mxfp8 import Mxfp8Weight, dequantize

Weight = Tensor | Mxfp8Weight


@dataclass(frozen=True)
class Activation:
    """Constants of SwiGLU-OAI, see `swiglu_oai`."""

    alpha: float
    beta: float
    limit: float


def stored(weight: Weight) -> tuple[Tensor, Tensor, bool]:
    """(values, scales, whether MXFP8) as kernels take them: bytes for MXFP8; for a plain tensor the scales are unused."""
    if isinstance(weight, Mxfp8Weight):
        return weight.values.view(torch.uint8), weight.scales, True
    return weight, weight, False


@triton.jit
def weight_tile(
    w_ptr, scale_ptr, o_row, m_row, begin, K: tl.constexpr, BLOCK_K: tl.constexpr, MXFP8: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Columns begin .. begin + BLOCK_K of the rows `o_row` (int64) of a [rows, K] weight as DTYPE; outside of it zeros."""
    o_k = begin + tl.arange(0, BLOCK_K)
    p_w = w_ptr + o_row[:, None] * K + o_k[None, :]
    m_w = m_row[:, None]
    if K % BLOCK_K != 0:
        m_w = m_w & (o_k < K)[None, :]
    if MXFP8:
        b_values = tl.load(p_w, mask=m_w, other=0, eviction_policy="evict_first")
        if K % 128 == 0 and BLOCK_K % 128 == 0:
            # Four scales in one word, which can be copied asynchronously; a single byte cannot.
            o_q = begin // 128 + tl.arange(0, BLOCK_K // 128)
            p_scale = scale_ptr.to(tl.pointer_type(tl.uint32)) + o_row[:, None] * (K // 128) + o_q[None, :]
            b_words = tl.load(p_scale, mask=m_row[:, None] & (o_q < K // 128)[None, :], other=0)
            b_bytes = (b_words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]).to(tl.uint8)
            b_scales = tl.reshape(b_bytes, [o_row.shape[0], BLOCK_K // 32])
        else:
            o_g = begin // 32 + tl.arange(0, BLOCK_K // 32)
            m_g = m_row[:, None] & (o_g < K // 32)[None, :]
            b_scales = tl.load(scale_ptr + o_row[:, None] * (K // 32) + o_g[None, :], mask=m_g, other=0)
        b_w = dequantize(b_values, b_scales, DTYPE)
    else:
        b_w = tl.load(p_w, mask=m_w, other=0.0, eviction_policy="evict_first")
    return b_w


@triton.jit
def dot_rows(b_x, b_w, acc):
    """Add x [M, K] times w [N, K] to `acc` [M, N]."""
    return tl.dot(b_x, tl.trans(b_w), acc, input_precision="ieee")


@triton.jit
def swiglu(gate, up, alpha, beta, limit):
    """SwiGLU-OAI of fp32 tiles."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)
