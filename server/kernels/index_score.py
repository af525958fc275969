"""Block scores of the index branch: for each query and block, the largest dot product with an index key of that block.

No scale, no softmax, no reduction over heads; keys after the query's own position do not count (M3 config:
`sparse_score_type` "max").
"""

import math

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch

_CHUNK_BYTES = 16 << 20  # token scores alive at a time in the twin


def num_blocks(batch: AttentionBatch) -> int:
    """Width of the batch's score rows: blocks of the longest sequence the batch may hold."""
    return -(-batch.max_seq_len // batch.page_size)


def index_score_torch(index_q: Tensor, index_lane: Tensor, batch: AttentionBatch, out: Tensor | None = None) -> Tensor:
    """Score every block for every query and index head.

    Twin of `index_score_prefill` and `index_score_decode`: sequence by sequence, a bounded number of queries at a time.

    Args:
        index_q: [T, Hi, Di] after norm and rotation.
        index_lane: [P, page, Di] index keys, those of this step already written.
        batch: B sequences, T tokens.
        out: [Hi, T, max_blocks] fp32 to write into; allocated when None.

    Returns:
        [Hi, T, max_blocks] fp32 with max_blocks = ceil(batch.max_seq_len / page); -inf in blocks after the query's own.
    """
    num_tokens, num_heads, _ = index_q.shape
    if out is None:
        out = index_q.new_empty((num_heads, num_tokens, num_blocks(batch)), dtype=torch.float32)
    out.fill_(-math.inf)
    bounds, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    for b, seq_len in enumerate(seq_lens):
        blocks = -(-seq_len // batch.page_size)
        keys = index_lane[batch.page_table[b, :blocks].long()].flatten(0, 1).float()  # [blocks * page, Di]
        step = max(1, _CHUNK_BYTES // (4 * num_heads * keys.shape[0]))
        for begin in range(bounds[b], bounds[b + 1], step):
            tokens = slice(begin, min(begin + step, bounds[b + 1]))
            out[:, tokens, :blocks] = _block_max(index_q[tokens].float(), keys, batch.positions[tokens], batch.page_size)
    return out


def _block_max(queries: Tensor, keys: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[t, Hi, Di] queries against [blocks * page, Di] keys: [Hi, t, blocks]."""
    scores = queries.transpose(0, 1) @ keys.T  # [Hi, t, blocks * page]
    # Columns before the earliest query's block are visible to all; from there on a mask also removes unwritten (NaN) slots.
    seen = int(positions.min()) // page_size * page_size
    late = torch.arange(seen, keys.shape[0], device=keys.device) > positions[:, None]
    scores[..., seen:].masked_fill_(late, -math.inf)
    return scores.view(scores.shape[0], scores.shape[1], -1, page_size).amax(-1)
