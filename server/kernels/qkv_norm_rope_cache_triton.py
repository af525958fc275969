"""Norm, rotation and cache write of one layer's packed projection in one launch on the GPU.

A program takes one token and a few neighbouring heads; which norm weight and which destination a head has follows from its
place in the packed row, so heads of different kinds may meet in a program.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv
from server.kernels.launch import pdl_options, wait_for_inputs


@triton.jit
def _norm_rope(rows, row_mask, weight, other_weight, use_other, cos_sin_row, eps, DIM: tl.constexpr, HALF: tl.constexpr):
    """Norm and rotate heads at the pointers rows [H, 1]: (rotated, raw), both [H, DIM] fp32.

    The rotation partner of a dimension is loaded again instead of exchanged between threads: it is in the first-level cache.
    """
    dims = tl.arange(0, DIM)[None, :]
    partners = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    rotated = dims < 2 * HALF
    raw = tl.load(rows + dims, mask=row_mask, other=0.0).to(tl.float32)
    partner = tl.load(rows + partners, mask=row_mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(raw * raw, 1) / DIM + eps)[:, None]
    own_gain = 1.0 + tl.where(use_other, tl.load(other_weight + dims), tl.load(weight + dims)).to(tl.float32)
    partner_gain = 1.0 + tl.where(use_other, tl.load(other_weight + partners), tl.load(weight + partners)).to(tl.float32)
    cos = tl.load(cos_sin_row + dims % HALF, mask=rotated, other=1.0)
    sin = tl.load(cos_sin_row + HALF + dims % HALF, mask=rotated, other=0.0)
    sign = tl.where(dims < HALF, -1.0, 1.0)
    return raw * scale * own_gain * cos + sign * (partner * scale * partner_gain) * sin, raw


@direct_launch
@triton.jit
def _qkv_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    index_q_norm_ptr,
    index_k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    index_q_ptr,
    kv_ptr,
    index_ptr,
    stride_qkv,
    stride_cos_sin,
    stride_kv_page,
    stride_kv_head,
    stride_kv_value,
    stride_kv_row,
    stride_index_page,
    stride_index_row,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_INDEX_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, groups of HEADS heads): first those of q | k | v, then those of index q | index k. Outputs are contiguous."""
    NUM_MAIN: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    MAIN_GROUPS: tl.constexpr = (NUM_MAIN + HEADS - 1) // HEADS
    wait_for_inputs(PDL)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    page, offset = slot // PAGE, slot % PAGE  # meaningful where slot >= 0
    cos_sin_row = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin
    qkv_ptr += token * stride_qkv
    dtype = qkv_ptr.dtype.element_ty
    if group < MAIN_GROUPS:
        head, dims = group * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
        is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
        mask = head < NUM_MAIN
        rotated, raw = _norm_rope(
            qkv_ptr + head * DIM, mask, q_norm_ptr, k_norm_ptr, head >= NUM_HEADS, cos_sin_row, eps, DIM, HALF
        )
        result = tl.where(is_value, raw, rotated).to(dtype)
        tl.store(q_ptr + (token * NUM_HEADS + head) * DIM + dims, result, mask=is_query)
        kv_head = (head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)).to(tl.int64)
        tile = kv_ptr + page * stride_kv_page + kv_head * stride_kv_head + tl.where(is_value, stride_kv_value, 0)
        cached = result.to(kv_ptr.dtype.element_ty)
        tl.store(tile + offset * stride_kv_row + dims, cached, mask=mask & (head >= NUM_HEADS) & (slot + head * 0 >= 0))
    else:
        index_head, index_dims = (group - MAIN_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, INDEX_DIM)[None, :]
        rows = qkv_ptr + NUM_MAIN * DIM + index_head * INDEX_DIM
        is_key = index_head == NUM_INDEX_HEADS
        turned, _ = _norm_rope(
            rows,
            index_head <= NUM_INDEX_HEADS,
            index_q_norm_ptr,
            index_k_norm_ptr,
            is_key,
            cos_sin_row,
            eps,
            INDEX_DIM,
            HALF,
        )
        queries = index_q_ptr + (token * NUM_INDEX_HEADS + index_head) * INDEX_DIM + index_dims
        tl.store(queries, turned.to(dtype), mask=index_head < NUM_INDEX_HEADS)
        key_row = index_ptr + page * stride_index_page + offset * stride_index_row
        key = turned.to(dtype).to(index_ptr.dtype.element_ty)
        tl.store(key_row + index_dims + index_head * 0, key, mask=is_key & (slot + index_head * 0 >= 0))


def qkv_norm_rope_cache_triton(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    index_q_norm: Tensor | None,
    index_k_norm: Tensor | None,
    cos_sin: Tensor,
    batch: AttentionBatch,
    kv_lane: Tensor,
    index_lane: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Norm, rotate and cache T tokens; arguments and results as in `qkv_norm_rope_cache`."""
    num_tokens = qkv.shape[0]
    _, num_kv_heads, _, page_size, dim = kv_lane.shape
    sparse = index_lane is not None and index_q_norm is not None and index_k_norm is not None
    index_dim = index_lane.shape[-1] if index_lane is not None and sparse else dim
    num_main = num_heads + 2 * num_kv_heads
    num_index = (qkv.shape[1] - num_main * dim) // index_dim - 1 if sparse else 0
    q = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    index_q = torch.empty((num_tokens, num_index, index_dim), dtype=qkv.dtype, device=qkv.device)
    heads = 4 if num_tokens <= 256 else 16
    num_groups = cdiv(num_main, heads) + (cdiv(num_index + 1, heads) if sparse else 0)
    if num_tokens:
        _qkv_kernel[(num_tokens, num_groups)](
            qkv,
            q_norm,
            k_norm,
            index_q_norm if sparse else q_norm,
            index_k_norm if sparse else k_norm,
            cos_sin,
            batch.positions,
            batch.slot_mapping,
            q,
            index_q,
            kv_lane,
            index_lane if sparse else kv_lane,
            qkv.stride(0),
            cos_sin.stride(0),
            kv_lane.stride(0),
            kv_lane.stride(1),
            kv_lane.stride(2),
            kv_lane.stride(3),
            index_lane.stride(0) if index_lane is not None and sparse else 0,
            index_lane.stride(1) if index_lane is not None and sparse else 0,
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            NUM_INDEX_HEADS=num_index,
            DIM=dim,
            INDEX_DIM=index_dim,
            HALF=cos_sin.shape[-1] // 2,
            PAGE=page_size,
            HEADS=heads,
            num_warps=1 if heads == 4 else 4,
            **pdl_options(qkv.device),
        )
    return q, index_q if sparse else None
