"""The whole selection of a sparse layer: block scores, then top-k."""

from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.block_topk import block_topk_torch
from server.kernels.index_score import index_score_torch


def msa_select_torch(
    index_q: Tensor, index_lane: Tensor, batch: AttentionBatch, topk: int, num_init_blocks: int, num_local_blocks: int
) -> Tensor:
    """Select the blocks that each query attends to.

    Twin of `msa_select_prefill` and `msa_select_decode`: the two ops one after the other.

    Args:
        index_q: [T, Hi, Di] after norm and rotation.
        index_lane: [P, page, Di] index keys, those of this step already written.
        batch: B sequences, T tokens.
        topk: blocks per query, forced ones included.
        num_init_blocks: leading blocks that are forced.
        num_local_blocks: blocks that end with the query's own and are forced.

    Returns:
        [Hi, T, topk] int32, ordered as `block_topk_torch` says. Index head h selects for KV head h.
    """
    scores = index_score_torch(index_q, index_lane, batch)
    return block_topk_torch(scores, batch, topk, num_init_blocks, num_local_blocks)
