"""Block scores of prefill chunks: one pass over the index keys for all index heads.

The rows of a program's tile are (query, head) pairs, so a key page is loaded once for all heads of up to 64 queries. The page
axis is split over programs to fill the device when a chunk is short.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv
from server.kernels.query_tiles import locate_query_tile, num_query_tiles, padded_num_seqs, query_tile, uses_hopper_kernels

GROUP = 16  # blocks whose largest score is also reported, for the two-level top-k
_TARGET_PROGRAMS = 1056  # eight waves of 132 multiprocessors: the last, partly filled one costs little


@direct_launch
@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "max_blocks",
        "blocks_per_split",
        "stride_oh",
        "stride_ot",
        "stride_gh",
        "stride_gt",
        "stride_pb",
    ],
    do_not_specialize_on_alignment=["out_ptr", "group_max_ptr", "query_start_ptr", "seq_lens_ptr", "page_table_ptr"],
)
def _score_kernel(
    q_ptr,
    k_ptr,
    out_ptr,
    group_max_ptr,
    query_start_ptr,
    seq_lens_ptr,
    page_table_ptr,
    num_seqs,
    max_blocks,
    blocks_per_split,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kn,
    stride_oh,
    stride_ot,
    stride_gh,
    stride_gt,
    stride_pb,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    FILL: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    ROWS: tl.constexpr = TILE * HEADS
    i_seq, first, begin, end, token_shift = locate_query_tile(
        query_start_ptr, seq_lens_ptr, num_seqs, tl.program_id(0), TILE, BLOCK_B
    )
    if end == 0:
        return
    block_begin = tl.program_id(1) * blocks_per_split
    block_end = tl.minimum(block_begin + blocks_per_split, max_blocks)
    own = first // PAGE
    if (not FILL) and (block_begin > own):
        return

    o_r = tl.arange(0, ROWS)
    o_pos = first + o_r // HEADS
    o_h = (o_r % HEADS).to(tl.int64)
    m_r = (o_pos >= begin) & (o_pos < end)
    o_t = (o_pos + token_shift).to(tl.int64)
    o_d = tl.arange(0, D)
    o_n = tl.arange(0, PAGE)
    p_out = out_ptr + o_h * stride_oh + o_t * stride_ot
    p_group = group_max_ptr + o_h * stride_gh + o_t * stride_gt
    p_pages = page_table_ptr + i_seq.to(tl.int64) * stride_pb
    p_k = k_ptr + o_n[None, :] * stride_kn + o_d[:, None]

    b_q = tl.load(q_ptr + (o_t * stride_qt + o_h * stride_qh)[:, None] + o_d[None, :], mask=m_r[:, None], other=0.0)
    b_group = tl.full([ROWS], float("-inf"), tl.float32)
    for i_block in range(block_begin, tl.minimum(block_end, own)):
        page = tl.load(p_pages + i_block).to(tl.int64)
        b_k = tl.load(p_k + page * stride_kp)
        b_max = tl.max(tl.dot(b_q, b_k, input_precision="ieee"), 1)
        tl.store(p_out + i_block, b_max, mask=m_r)
        if WITH_GROUPS:
            b_group = tl.maximum(b_group, b_max)
            if i_block % GROUP == GROUP - 1:
                tl.store(p_group + i_block // GROUP, b_group, mask=m_r)
                b_group = tl.full([ROWS], float("-inf"), tl.float32)
    if (own >= block_begin) & (own < block_end):
        page = tl.load(p_pages + own).to(tl.int64)
        b_k = tl.load(p_k + page * stride_kp)
        b_s = tl.dot(b_q, b_k, input_precision="ieee")
        # Slots after the query are masked before the maximum, so unwritten ones (maybe NaN) do not count.
        b_s = tl.where(own * PAGE + o_n[None, :] <= o_pos[:, None], b_s, float("-inf"))
        b_max = tl.max(b_s, 1)
        tl.store(p_out + own, b_max, mask=m_r)
        if WITH_GROUPS:
            tl.store(p_group + own // GROUP, tl.maximum(b_group, b_max), mask=m_r)
    if FILL:
        for i_block in range(tl.maximum(block_begin, own + 1), block_end):
            tl.store(p_out + i_block, tl.full([ROWS], float("-inf"), tl.float32), mask=m_r)


def blocks_per_split(num_tiles: int, max_blocks: int) -> int:
    """Length of the page axis of one program, a multiple of the group: long enough to amortise the query load."""
    splits = max(1, cdiv(_TARGET_PROGRAMS, max(1, num_tiles)))
    length = cdiv(cdiv(max_blocks, splits), GROUP) * GROUP
    return int(length)


def score_blocks(
    index_q: Tensor, index_lane: Tensor, batch: AttentionBatch, out: Tensor, group_max: Tensor | None, *, fill: bool
) -> None:
    """Write block scores, and the maxima of groups of `GROUP` blocks when asked.

    Args:
        index_q: [T, Hi, Di].
        index_lane: [P, page, Di].
        batch: prefill sequences.
        out: [Hi, T, max_blocks] fp32.
        group_max: [Hi, T, ceil(max_blocks / GROUP)] fp32, or None; groups behind the own block's are not written.
        fill: write -inf behind the own block; otherwise those columns keep what they held.
    """
    num_heads, index_dim = index_q.shape[1], index_q.shape[2]
    tile = query_tile(num_heads, batch.page_size)
    num_tiles = num_query_tiles(batch, tile)
    max_blocks = out.shape[2]
    groups = out if group_max is None else group_max
    geometry = (index_dim, batch.page_size)
    if geometry == (128, 128) and tile * num_heads >= 128 and index_lane.is_contiguous() and uses_hopper_kernels(index_q):
        from server.kernels.index_score_hopper import score_blocks_hopper

        score_blocks_hopper(index_q, index_lane, batch, out, group_max, fill=fill)
        return
    length = blocks_per_split(num_tiles, max_blocks)
    _score_kernel[(num_tiles, cdiv(max_blocks, length))](
        index_q,
        index_lane,
        out,
        groups,
        batch.query_start,
        batch.seq_lens,
        batch.page_table,
        batch.seq_lens.shape[0],
        max_blocks,
        length,
        index_q.stride(0),
        index_q.stride(1),
        index_lane.stride(0),
        index_lane.stride(1),
        out.stride(0),
        out.stride(1),
        groups.stride(0),
        groups.stride(1),
        batch.page_table.stride(0),
        HEADS=num_heads,
        D=index_dim,
        PAGE=batch.page_size,
        TILE=tile,
        GROUP=GROUP,
        BLOCK_B=padded_num_seqs(batch),
        FILL=fill,
        WITH_GROUPS=group_max is not None,
        num_warps=8 if tile * num_heads >= 128 else 4,
        num_stages=3,
    )


def index_score_prefill(index_q: Tensor, index_lane: Tensor, batch: AttentionBatch, out: Tensor) -> Tensor:
    """Score blocks for the queries of prefills, as `index_score_torch` does.

    `out` may be a view with any strides but a contiguous last dimension.
    """
    assert out.dtype == torch.float32
    score_blocks(index_q, index_lane, batch, out, None, fill=True)
    return out
