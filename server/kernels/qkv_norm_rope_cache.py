"""From the packed projection to normed, rotated queries and a written cache, in one fp32 pass.

Per head: Gemma RMSNorm of q, k, index q and index k over the whole head, NeoX (half-split) rotation of the first `rotary_dim`
dimensions, one rounding. Values are copied as they are. Keys, values and index keys go to their page slots.
"""

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch


def norm_rope_torch(heads: Tensor, weight: Tensor, cos_sin: Tensor, eps: float) -> Tensor:
    """Norm and rotate heads [T, H, D] with rows [T, rotary_dim] of the cos|sin table; fp32 inside, input dtype out."""
    x = heads.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]  # [T, 1, rotary_dim / 2]
    low, high, passed = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, passed), dim=-1).to(heads.dtype)


def qkv_norm_rope_cache_torch(
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
    """Twin of `qkv_norm_rope_cache`."""
    num_tokens = qkv.shape[0]
    _, num_kv_heads, _, page_size, head_dim = kv_lane.shape
    q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    q, k, v, index = torch.split(qkv, [q_width, kv_width, kv_width, qkv.shape[1] - q_width - 2 * kv_width], dim=1)
    rows = cos_sin[batch.positions]  # [T, rotary_dim]
    is_written = batch.slot_mapping >= 0
    slots = batch.slot_mapping[is_written]
    pages, offsets = slots // page_size, slots % page_size

    key = norm_rope_torch(k.reshape(num_tokens, num_kv_heads, head_dim), k_norm, rows, eps)
    value = v.reshape(num_tokens, num_kv_heads, head_dim)
    kv_lane[:, :, 0][pages, :, offsets] = key[is_written].to(kv_lane.dtype)
    kv_lane[:, :, 1][pages, :, offsets] = value[is_written].to(kv_lane.dtype)
    query = norm_rope_torch(q.reshape(num_tokens, num_heads, head_dim), q_norm, rows, eps)
    if index_lane is None or index_q_norm is None or index_k_norm is None:
        return query, None

    index_dim = index_lane.shape[-1]
    index_heads = index.reshape(num_tokens, -1, index_dim)  # the last head is the shared key
    index_key = norm_rope_torch(index_heads[:, -1:], index_k_norm, rows, eps)
    index_lane[pages, offsets] = index_key[is_written, 0].to(index_lane.dtype)
    return query, norm_rope_torch(index_heads[:, :-1], index_q_norm, rows, eps)


def qkv_norm_rope_cache(
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
    """Norm, rotate and cache one layer's projections.

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D + Hi * Di + Di], packed q | k | v | index q | index k; a dense layer ends after v.
        q_norm: [D], one vector for all heads.
        k_norm: [D], one vector for all heads.
        index_q_norm: [Di], one vector for all index heads; None on dense layers.
        index_k_norm: [Di]; None on dense layers.
        cos_sin: [max_positions, rotary_dim] fp32, cosines then sines.
        batch: gives positions and cache slots of the T tokens; one whose slot is negative is written to no cache.
        kv_lane: [P, Hkv, 2, page, D], written.
        index_lane: [P, page, Di], written; None on dense layers.
        num_heads: Hq.
        eps: of the norms.

    Returns:
        (q [T, Hq, D], index q [T, Hi, Di] or None), in the dtype of `qkv`.
    """
    if qkv.is_cuda:
        from server.kernels.qkv_norm_rope_cache_triton import qkv_norm_rope_cache_triton

        return qkv_norm_rope_cache_triton(
            qkv, q_norm, k_norm, index_q_norm, index_k_norm, cos_sin, batch, kv_lane, index_lane, num_heads, eps
        )
    return qkv_norm_rope_cache_torch(
        qkv, q_norm, k_norm, index_q_norm, index_k_norm, cos_sin, batch, kv_lane, index_lane, num_heads, eps
    )
