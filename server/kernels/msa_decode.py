"""A sparse layer's whole decode attention: scores, selection and attention of single-token sequences.

Equal to `msa_select_decode` and `sparse_decode` one after the other, but every attention program selects by itself from the
scores: that costs each a microsecond or two and saves a launch with its wait.
"""

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.index_score_decode import launch_scores
from server.kernels.selection_rule import SelectionRule
from server.kernels.sparse_decode import HostTier, sparse_decode


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
