"""MiniMax Sparse Attention of one layer: score the blocks, select, attend."""

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.msa_select import msa_select_torch
from server.kernels.selection_rule import SelectionRule
from server.kernels.sparse_attention import sparse_attention_torch


def msa_attention_torch(
    q: Tensor,
    index_q: Tensor,
    kv_lane: Tensor,
    index_lane: Tensor,
    batch: AttentionBatch,
    rule: SelectionRule,
    scale: float,
) -> Tensor:
    """Twin of `msa_attention`: the selection, then attention over it."""
    selection = msa_select_torch(index_q, index_lane, batch, rule.topk, rule.num_init_blocks, rule.num_local_blocks)
    return sparse_attention_torch(q, kv_lane, selection, batch, scale)


def msa_attention(
    q: Tensor,
    index_q: Tensor,
    kv_lane: Tensor,
    index_lane: Tensor,
    batch: AttentionBatch,
    rule: SelectionRule,
    scale: float,
) -> Tensor:
    """Attend to the blocks that the index branch selects.

    Args:
        q: [T, Hq, D] after norm and rotation.
        index_q: [T, Hi, Di] after norm and rotation; index head h selects for KV head h, Hi = Hkv.
        kv_lane: [P, Hkv, 2, page, D], this step's keys and values already written.
        index_lane: [P, page, Di], this step's index keys already written.
        batch: B sequences, T tokens.
        rule: what to select.
        scale: factor of the attention scores, 1 / sqrt(D).

    Returns:
        [T, Hq, D] in the dtype of `q`; softmax in fp32.
    """
    if not q.is_cuda:
        return msa_attention_torch(q, index_q, kv_lane, index_lane, batch, rule, scale)
    out = torch.empty_like(q)
    n, decodes, prefills = batch.num_decodes, batch.decodes, batch.prefills
    if decodes is not None:
        from server.kernels.msa_decode import msa_decode

        msa_decode(q[:n], index_q[:n], kv_lane, index_lane, decodes, rule, scale, out[:n])
    if prefills is not None:
        from server.kernels.msa_select_prefill import msa_select_prefill
        from server.kernels.sparse_prefill import sparse_prefill

        num_index_heads, num_tokens = index_q.shape[1], q.shape[0] - n
        selection = torch.empty((num_index_heads, num_tokens, rule.topk), dtype=torch.int32, device=q.device)
        msa_select_prefill(index_q[n:], index_lane, prefills, rule.topk, rule.num_init_blocks, rule.num_local_blocks, selection)
        sparse_prefill(q[n:], kv_lane, selection, prefills, scale, out[n:])
    return out
