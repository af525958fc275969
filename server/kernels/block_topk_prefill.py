"""Exact block top-k of prefill rows by two levels: the best groups of 16 blocks, then the best blocks inside them.

A block among the k best of (score descending, id ascending) lies in one of the k best groups of (largest score descending, id
ascending): otherwise k groups each hold a block that precedes it. Groups with a forced block are ranked first, and as there
are never more forced blocks than k, the groups that the free slots need still fit.

Scores are ranked as 64-bit integers: the fp32 bits in an order-preserving form, then the inverted id.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.direct_launch import direct_launch
from server.kernels.index_score_prefill import GROUP
from server.kernels.integers import cdiv, next_power_of_2

_MAX_DIRECT = 256  # rows up to this many blocks are ranked at once
_GROUP_WIDTHS = (64, 256, 512, 1024)  # few, because each width is a compilation of several seconds


@triton.jit
def rank_key(score, index, valid):
    """64-bit key whose descending order is (score descending, index ascending); invalid entries come last."""
    score = tl.where(score == score, score, float("-inf"))
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 and 0.0 tie
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return tl.where(valid, key, -0x7FFFFFFFFFFFFFFF)


@triton.jit
def key_index(key):
    """The index inside a key of `rank_key`; -1 for an invalid one."""
    index = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    return tl.where(key == -0x7FFFFFFFFFFFFFFF, -1, index)


@direct_launch
@triton.jit(
    do_not_specialize=["num_tokens", "max_blocks", "num_groups", "stride_sh", "stride_st"],
    do_not_specialize_on_alignment=["scores_ptr"],
)
def _group_max_kernel(
    scores_ptr,
    group_max_ptr,
    num_tokens,
    max_blocks,
    num_groups,
    stride_sh,
    stride_st,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_h, i_t = i_row // num_tokens, i_row % num_tokens
    o_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    o_n = o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_s = tl.load(scores_ptr + i_h * stride_sh + i_t * stride_st + o_n, mask=o_n < max_blocks, other=float("-inf"))
    b_s = tl.where(b_s == b_s, b_s, float("-inf"))
    tl.store(group_max_ptr + i_row * num_groups + o_g, tl.max(b_s, 1), mask=o_g < num_groups)


@direct_launch
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_rows",
        "max_blocks",
        "num_init_blocks",
        "num_local_blocks",
        "stride_sh",
        "stride_st",
        "stride_gh",
        "stride_gt",
        "stride_oh",
    ],
    do_not_specialize_on_alignment=["scores_ptr", "group_max_ptr", "positions_ptr"],
)
def _select_kernel(
    scores_ptr,
    group_max_ptr,
    positions_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    max_blocks,
    num_init_blocks,
    num_local_blocks,
    stride_sh,
    stride_st,
    stride_gh,
    stride_gt,
    stride_oh,
    stride_ot,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    o_h = (o_row // num_tokens).to(tl.int64)
    o_t = (o_row % num_tokens).to(tl.int64)
    own = (tl.load(positions_ptr + o_t, mask=m_row, other=0) // PAGE).to(tl.int32)[:, None]  # [ROWS, 1]
    local_begin = own - num_local_blocks + 1
    if BLOCK_G == 0:
        o_n = tl.arange(0, BLOCK_N)[None, :]
    else:
        o_g = tl.arange(0, BLOCK_G)[None, :]
        m_g = (o_g <= own // GROUP) & m_row[:, None]
        b_g = tl.load(group_max_ptr + (o_h * stride_gh + o_t * stride_gt)[:, None] + o_g, mask=m_g, other=float("-inf"))
        forced = (o_g * GROUP < num_init_blocks) | (o_g * GROUP + GROUP > local_begin)
        b_g = tl.where(forced, float("inf"), b_g)
        b_best = key_index(tl.topk(rank_key(b_g, o_g, m_g), TOPK_PAD))  # [ROWS, TOPK_PAD] group ids
        o_n = b_best[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
        o_n = tl.reshape(o_n, [ROWS, TOPK_PAD * GROUP])
    m_n = (o_n >= 0) & (o_n <= own) & m_row[:, None]
    p_s = scores_ptr + (o_h * stride_sh + o_t * stride_st)[:, None] + o_n
    b_s = tl.load(p_s, mask=m_n & (o_n < max_blocks), other=float("-inf"))
    b_s = tl.where((o_n < num_init_blocks) | (o_n >= local_begin), float("inf"), b_s)
    b_s = tl.where(own < TOPK, 0.0, b_s)  # all blocks, ascending, as when nothing is scored
    b_id = key_index(tl.topk(rank_key(b_s, o_n, m_n), TOPK_PAD))
    o_k = tl.arange(0, TOPK_PAD)[None, :]
    p_out = out_ptr + (o_h * stride_oh + o_t * stride_ot)[:, None] + o_k
    tl.store(p_out, b_id, mask=m_row[:, None] & (o_k < TOPK))


def select_blocks(
    scores: Tensor,
    group_max: Tensor | None,
    batch: AttentionBatch,
    topk: int,
    num_init_blocks: int,
    num_local_blocks: int,
    out: Tensor,
) -> None:
    """Rank blocks by scores [Hi, T, max_blocks]; `group_max` [Hi, T, groups] is needed beyond 256 blocks.

    Columns behind the own block, and groups behind its group, are not read.
    """
    num_heads, num_tokens, max_blocks = scores.shape
    topk_pad = next_power_of_2(topk)
    block_n = 64 if max_blocks <= 64 else _MAX_DIRECT
    block_g = 0
    if max_blocks > _MAX_DIRECT:
        assert group_max is not None
        block_g = next(width for width in _GROUP_WIDTHS if width >= group_max.shape[2])
    groups = scores if group_max is None else group_max
    rows = 2
    num_rows = num_heads * num_tokens
    _select_kernel[(cdiv(num_rows, rows),)](
        scores,
        groups,
        batch.positions,
        out,
        num_tokens,
        num_rows,
        max_blocks,
        num_init_blocks,
        num_local_blocks,
        scores.stride(0),
        scores.stride(1),
        groups.stride(0),
        groups.stride(1),
        out.stride(0),
        out.stride(1),
        PAGE=batch.page_size,
        TOPK=topk,
        TOPK_PAD=topk_pad,
        GROUP=GROUP,
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        ROWS=rows,
        num_warps=1,
    )


def block_topk_prefill(
    scores: Tensor, batch: AttentionBatch, topk: int, num_init_blocks: int, num_local_blocks: int, out: Tensor
) -> Tensor:
    """Select from scores of prefills, as `block_topk_torch` does.

    `out` [Hi, T, topk] int32 may be a view with a contiguous last dimension.
    """
    num_heads, num_tokens, max_blocks = scores.shape
    group_max = None
    if max_blocks > _MAX_DIRECT:
        num_groups = cdiv(max_blocks, GROUP)
        group_max = scores.new_empty((num_heads, num_tokens, num_groups))
        block_g = min(64, next_power_of_2(num_groups))
        _group_max_kernel[(num_heads * num_tokens, cdiv(num_groups, block_g))](
            scores,
            group_max,
            num_tokens,
            max_blocks,
            num_groups,
            scores.stride(0),
            scores.stride(1),
            GROUP=GROUP,
            BLOCK_G=block_g,
            num_warps=2,
        )
    select_blocks(scores, group_max, batch, topk, num_init_blocks, num_local_blocks, out)
    return out
