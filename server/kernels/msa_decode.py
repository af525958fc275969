"""A sparse layer's whole decode attention: scores, selection and attention of single-token sequences.

Equal to `msa_select_decode` and `sparse_decode` one after the other, with fewer waits between them. A small batch starts to
fetch the selected tiles while it still launches the attention; in a large one every attention program selects by itself.
"""

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.index_score_decode import launch_scores
from server.kernels.msa_select_decode import msa_select_decode
from server.kernels.sparse_decode import HostTier, SelectionRule, sparse_decode

_WARM_BYTES = 36 << 20  # of tiles that the second-level cache may be asked to hold ahead of time


def msa_decode(
    q: Tensor,
    index_q: Tensor,
    kv_lane: Tensor,
    index_lane: Tensor,
    batch: AttentionBatch,
    rule: SelectionRule,
    scale: float,
    out: Tensor,
    host_tier: HostTier | None = None,
) -> None:
    """Select and attend, B single-token sequences.

    Args:
        q: [B, Hq, D].
        index_q: [B, Hi, Di], Hi = Hkv.
        kv_lane: [P, Hkv, 2, page, D], or a host tier's smaller one.
        index_lane: [P, page, Di].
        batch: B sequences of one query token.
        rule: what to select.
        scale: factor of the attention scores.
        out: [B, Hq, D], written.
        host_tier: see `sparse_decode`.
    """
    num_tokens, num_index_heads, _ = index_q.shape
    tile_bytes = kv_lane[0].numel() * kv_lane.element_size()
    if num_tokens * rule.topk * tile_bytes <= _WARM_BYTES:
        selection = torch.empty((num_index_heads, num_tokens, rule.topk), dtype=torch.int32, device=q.device)
        msa_select_decode(
            index_q,
            index_lane,
            batch,
            rule.topk,
            rule.num_init_blocks,
            rule.num_local_blocks,
            selection,
            warm_lane=kv_lane if host_tier is None else None,
        )
        sparse_decode(q, kv_lane, selection, batch, scale, out, host_tier)
        return
    max_blocks = -(-batch.max_seq_len // batch.page_size)
    scores = torch.empty((num_index_heads, num_tokens, max_blocks), dtype=torch.float32, device=q.device)
    launch_scores(
        index_q,
        index_lane,
        batch,
        scores,
        select_over=rule.topk,
        num_init_blocks=rule.num_init_blocks,
        num_local_blocks=rule.num_local_blocks,
    )
    sparse_decode(q, kv_lane, scores, batch, scale, out, host_tier, rule)
