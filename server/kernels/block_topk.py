"""Which blocks a query attends to: the best scored ones, some of them forced.

Order and ties are fixed: score descending, then block ascending; so a selection does not depend on batch mates or chunks.
"""

import math

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch


def block_topk_torch(scores: Tensor, batch: AttentionBatch, topk: int, num_init_blocks: int, num_local_blocks: int) -> Tensor:
    """Select up to `topk` blocks per query and index head.

    Twin of `block_topk_prefill` and `block_topk_decode`.

    Args:
        scores: [Hi, T, max_blocks] fp32 of `index_score_torch`.
        batch: gives positions; a query sees blocks 0 .. own, own = position // page.
        topk: blocks per query, forced ones included.
        num_init_blocks: blocks 0 .. n-1 are forced.
        num_local_blocks: the own block and the n-1 before it are forced.

    Returns:
        [Hi, T, topk] int32 block ids, forced blocks first (ascending), then by (score descending, id ascending), then -1.
    """
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    own = (batch.positions // batch.page_size)[:, None]  # [T, 1]
    visible = blocks <= own  # [T, max_blocks]
    forced = visible & ((blocks < num_init_blocks) | (blocks > own - num_local_blocks))
    key = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    key = key.masked_fill(forced, math.inf).masked_fill(~visible, -math.inf)
    # Invisible blocks have the highest ids, so a stable sort leaves them behind visible ones that score -inf too.
    order = key.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    selection = torch.where(order <= own, order, -1).to(torch.int32)
    return torch.nn.functional.pad(selection, (0, topk - selection.shape[-1]), value=-1)
