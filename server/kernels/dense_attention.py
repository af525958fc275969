"""Ordinary causal attention over a whole paged sequence, for the leading layers without selection."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from server.kernels.attention_batch import AttentionBatch

_QUERIES_PER_CHUNK = 256  # bounds the mask and the scores in the twin


def dense_attention_torch(q: Tensor, kv_lane: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Twin of `dense_attention`: copies each sequence's pages together, then attends chunk by chunk in fp32."""
    out = torch.empty_like(q)
    bounds, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    for b, seq_len in enumerate(seq_lens):
        pages = batch.page_table[b, : -(-seq_len // batch.page_size)].long()
        # [Hkv, 2, seq_len, D]; cutting at seq_len leaves unwritten slots behind
        kv = kv_lane[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len].float()
        for begin in range(bounds[b], bounds[b + 1], _QUERIES_PER_CHUNK):
            tokens = slice(begin, min(begin + _QUERIES_PER_CHUNK, bounds[b + 1]))
            positions = batch.positions[tokens]
            num_keys = int(positions.max()) + 1
            visible = torch.arange(num_keys, device=q.device) <= positions[:, None]  # [t, num_keys]
            out[tokens] = scaled_dot_product_attention(
                q[tokens].float().transpose(0, 1)[None],
                kv[None, :, 0, :num_keys],
                kv[None, :, 1, :num_keys],
                attn_mask=visible,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
    return out


def dense_attention(q: Tensor, kv_lane: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Attend to every earlier position of the sequence and the query's own.

    Args:
        q: [T, Hq, D] after norm and rotation.
        kv_lane: [P, Hkv, 2, page, D], this step's keys and values already written.
        batch: B sequences, T tokens.
        scale: factor of the scores, 1 / sqrt(D).

    Returns:
        [T, Hq, D] in the dtype of `q`; softmax in fp32.
    """
    if not q.is_cuda:
        return dense_attention_torch(q, kv_lane, batch, scale)
    out = torch.empty_like(q)
    n, decodes, prefills = batch.num_decodes, batch.decodes, batch.prefills
    if decodes is not None:
        from server.kernels.dense_decode import dense_decode

        dense_decode(q[:n], kv_lane, decodes, scale, out[:n])
    if prefills is not None:
        from server.kernels.dense_prefill import dense_prefill

        dense_prefill(q[n:], kv_lane, prefills, scale, out[n:])
    return out
