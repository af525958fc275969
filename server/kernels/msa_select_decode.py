"""Scores and selection of single-token sequences: two launches, the second one's start hidden behind the first.

Forced blocks are never scored, and sequences with at most `topk` blocks read no keys.
"""

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.block_topk_decode import block_topk_decode
from server.kernels.index_score_decode import ScoreConfig, launch_scores


def msa_select_decode(
    index_q: Tensor,
    index_lane: Tensor,
    batch: AttentionBatch,
    topk: int,
    num_init_blocks: int,
    num_local_blocks: int,
    out: Tensor,
    config: ScoreConfig | None = None,
) -> None:
    """Select `topk` blocks for B single-token sequences.

    Args:
        index_q: [B, Hi, Di].
        index_lane: [P, page, Di].
        batch: B sequences of one query token.
        topk: blocks per query, at least the forced ones.
        num_init_blocks: leading blocks that are forced.
        num_local_blocks: blocks that end with the own one and are forced, at least 1.
        out: [Hi, B, topk] int32, ordered as in `block_topk_decode`.
        config: how to run the scores; chosen by shape when None.
    """
    max_blocks = -(-batch.max_seq_len // batch.page_size)
    scores = torch.empty((index_q.shape[1], index_q.shape[0], max_blocks), dtype=torch.float32, device=index_q.device)
    launch_scores(
        index_q,
        index_lane,
        batch,
        scores,
        select_over=topk,
        num_init_blocks=num_init_blocks,
        num_local_blocks=num_local_blocks,
        config=config,
    )
    block_topk_decode(scores, batch, topk, num_init_blocks, num_local_blocks, out)
