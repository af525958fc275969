"""Attention of each query over the blocks that its index head selected, causal inside its own block.

Query head h belongs to KV head h // (Hq / Hkv); all query heads of a KV head share one selection.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from server.kernels.attention_batch import AttentionBatch

_QUERIES_PER_CHUNK = 64
_CHUNK_BYTES = 64 << 20  # gathered tiles alive at a time in the twin


def sparse_attention_torch(q: Tensor, kv_lane: Tensor, selection: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Attend to selected blocks.

    Twin of `sparse_prefill` and `sparse_decode`: a few queries at a time, over all blocks that any of them chose.

    Args:
        q: [T, Hq, D] after norm and rotation.
        kv_lane: [P, Hkv, 2, page, D], this step's keys and values already written.
        selection: [Hkv, T, topk] int32 block ids of each query's sequence, -1 for none; any order, no repeats.
        batch: B sequences, T tokens.
        scale: factor of the scores, 1 / sqrt(D).

    Returns:
        [T, Hq, D] in the dtype of `q`; softmax in fp32.
    """
    out = torch.empty_like(q)
    bounds, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    for b, seq_len in enumerate(seq_lens):
        pages = batch.page_table[b].long()
        step = _queries_per_chunk(kv_lane, selection.shape[0] * selection.shape[2], seq_len)
        for begin in range(bounds[b], bounds[b + 1], step):
            tokens = slice(begin, min(begin + step, bounds[b + 1]))
            chosen = selection[:, tokens]
            blocks = torch.unique(chosen[chosen >= 0]).long()  # [U], ascending
            tiles = kv_lane[pages[blocks]].float()  # [U, Hkv, 2, page, D]
            out[tokens] = _attend(q[tokens], tiles, blocks, chosen, batch.positions[tokens], seq_len, scale).to(q.dtype)
    return out


def _queries_per_chunk(kv_lane: Tensor, num_choices: int, seq_len: int) -> int:
    """How many queries may gather together, when each of them chooses at most `num_choices` blocks over all heads."""
    _, num_kv_heads, _, page_size, head_dim = kv_lane.shape
    num_tiles = _CHUNK_BYTES // (4 * num_kv_heads * 2 * page_size * head_dim)
    if seq_len <= num_tiles * page_size:
        return _QUERIES_PER_CHUNK
    return min(_QUERIES_PER_CHUNK, max(1, num_tiles // num_choices))


def _attend(q: Tensor, tiles: Tensor, blocks: Tensor, chosen: Tensor, positions: Tensor, seq_len: int, scale: float) -> Tensor:
    """Queries [t, Hq, D] over the blocks [U] in `tiles`, each only over its own `chosen` [Hkv, t, topk]: [t, Hq, D] fp32."""
    num_kv_heads, page_size = tiles.shape[1], tiles.shape[3]
    key_positions = (blocks[:, None] * page_size + torch.arange(page_size, device=q.device)).flatten()  # [U * page]
    kv = tiles.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [Hkv, 2, U * page, D]
    kv = kv.masked_fill((key_positions >= seq_len)[:, None], 0.0)  # unwritten slots may hold NaN, and 0 * NaN is NaN
    selected = (chosen[..., None] == blocks).any(-2)  # [Hkv, t, U]
    visible = selected.repeat_interleave(page_size, dim=-1) & (key_positions <= positions[:, None])  # [Hkv, t, U * page]
    queries = q.float().view(q.shape[0], num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # [Hkv, G, t, D]
    attended = scaled_dot_product_attention(
        queries, kv[:, :1], kv[:, 1:], attn_mask=visible[:, None], scale=scale, enable_gqa=True
    )
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
