"""The selection of a prefill chunk: the scorer reports group maxima, so that ranking reads a sixteenth of the scores."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.block_topk_prefill import select_blocks
from server.kernels.direct_launch import direct_launch
from server.kernels.index_score_prefill import GROUP, score_blocks
from server.kernels.integers import cdiv, next_power_of_2


@direct_launch
@triton.jit(do_not_specialize=["num_tokens", "stride_oh"], do_not_specialize_on_alignment=["positions_ptr"])
def _identity_kernel(positions_ptr, out_ptr, num_tokens, stride_oh, stride_ot, PAGE: tl.constexpr, TOPK: tl.constexpr,
                     TOPK_PAD: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    o_t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, TOPK_PAD)[None, :]
    m_t = o_t < num_tokens
    own = (tl.load(positions_ptr + o_t, mask=m_t, other=0) // PAGE).to(tl.int32)[:, None]
    p_out = out_ptr + tl.program_id(1).to(tl.int64) * stride_oh + o_t.to(tl.int64)[:, None] * stride_ot + o_k
    tl.store(p_out, tl.where(o_k <= own, o_k, -1), mask=m_t[:, None] & (o_k < TOPK))


def msa_select_prefill(
    index_q: Tensor,
    index_lane: Tensor,
    batch: AttentionBatch,
    topk: int,
    num_init_blocks: int,
    num_local_blocks: int,
    out: Tensor,
) -> Tensor:
    """Select blocks for the queries of prefills, as `msa_select_torch` does.

    When no sequence has more than `topk` blocks, every query takes all its blocks (ascending) and nothing is scored.

    Args:
        index_q: [T, Hi, Di].
        index_lane: [P, page, Di].
        batch: prefill sequences.
        topk: blocks per query.
        num_init_blocks: leading forced blocks.
        num_local_blocks: trailing forced blocks.
        out: [Hi, T, topk] int32 to write into.
    """
    num_tokens, num_heads, _ = index_q.shape
    max_blocks = cdiv(batch.max_seq_len, batch.page_size)
    if max_blocks <= topk:
        rows = 32
        _identity_kernel[(cdiv(num_tokens, rows), num_heads)](
            batch.positions,
            out,
            num_tokens,
            out.stride(0),
            out.stride(1),
            PAGE=batch.page_size,
            TOPK=topk,
            TOPK_PAD=next_power_of_2(topk),
            ROWS=rows,
        )
        return out
    scores = index_q.new_empty((num_heads, num_tokens, max_blocks), dtype=torch.float32)
    group_max = index_q.new_empty((num_heads, num_tokens, cdiv(max_blocks, GROUP)), dtype=torch.float32)
    score_blocks(index_q, index_lane, batch, scores, group_max, fill=False)
    select_blocks(scores, group_max, batch, topk, num_init_blocks, num_local_blocks, out)
    return out
