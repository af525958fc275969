"""The whole selection of a sparse layer: block scores, then top-k, fused where that wins."""

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.block_topk import block_topk_torch
from server.kernels.index_score import index_score_torch


def msa_select_torch(
    index_q: Tensor, index_lane: Tensor, batch: AttentionBatch, topk: int, num_init_blocks: int, num_local_blocks: int
) -> Tensor:
    """Twin of `msa_select`: the two ops one after the other."""
    scores = index_score_torch(index_q, index_lane, batch)
    return block_topk_torch(scores, batch, topk, num_init_blocks, num_local_blocks)


def msa_select(
    index_q: Tensor, index_lane: Tensor, batch: AttentionBatch, topk: int, num_init_blocks: int, num_local_blocks: int
) -> Tensor:
    """Select the blocks that each query attends to.

    Args:
        index_q: [T, Hi, Di] after norm and rotation.
        index_lane: [P, page, Di] index keys, those of this step already written.
        batch: B sequences, T tokens.
        topk: blocks per query, forced ones included.
        num_init_blocks: leading blocks that are forced.
        num_local_blocks: blocks that end with the query's own and are forced.

    Returns:
        [Hi, T, topk] int32, ordered as `block_topk` says. Index head h selects for KV head h.
    """
    if not index_q.is_cuda:
        return msa_select_torch(index_q, index_lane, batch, topk, num_init_blocks, num_local_blocks)
    num_tokens, num_heads, _ = index_q.shape
    out = index_q.new_empty((num_heads, num_tokens, topk), dtype=torch.int32)
    n, decodes, prefills = batch.num_decodes, batch.decodes, batch.prefills
    if decodes is not None:
        from server.kernels.msa_select_decode import msa_select_decode

        msa_select_decode(index_q[:n], index_lane, decodes, topk, num_init_blocks, num_local_blocks, out[:, :n])
    if prefills is not None:
        from server.kernels.msa_select_prefill import msa_select_prefill

        msa_select_prefill(index_q[n:], index_lane, prefills, topk, num_init_blocks, num_local_blocks, out[:, n:])
    return out
