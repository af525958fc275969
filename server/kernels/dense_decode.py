"""Attention of single-token sequences over their whole paged context, split along the keys.

A unit is a sequence and KV head. Its tiles are cut evenly over programs by its own length; a second, tiny launch merges their
partial results where there are any.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.decode_tiles import MIN_SIDE, Partials, attend_tile, load_group, merge, store_output, store_partial
from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv, next_power_of_2
from server.kernels.launch import pdl_options, wait_for_inputs


@dataclass(frozen=True)
class DenseConfig:
    """How a unit's tiles are cut over programs, and how these run."""

    num_splits: int
    tiles_per_page: int
    num_stages: int
    num_warps: int


@direct_launch
@triton.jit(do_not_specialize=["num_splits", "stride_table"])
def _dense_decode_kernel(
    q_ptr,
    lane_ptr,
    page_table_ptr,
    seq_lens_ptr,
    acc_ptr,
    stats_ptr,
    out_ptr,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_head,
    stride_value,
    stride_row,
    stride_table,
    stride_out_token,
    stride_out_head,
    num_splits,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILES_PER_PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * NUM_KV_HEADS * num_splits,); KV heads of a split are neighbours. Scratch as in sparse decode."""
    wait_for_inputs(PDL)
    head = (tl.program_id(0) % NUM_KV_HEADS).to(tl.int64)
    split = tl.program_id(0) // NUM_KV_HEADS % num_splits
    b = (tl.program_id(0) // (NUM_KV_HEADS * num_splits)).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + b)
    queries = load_group(q_ptr + b * stride_q_token + head * GROUP * stride_q_head, stride_q_head, GROUP, DIM, GROUP_PAD)
    page_table_ptr += b * stride_table
    lane_ptr += head * stride_head
    peak = tl.full((GROUP_PAD,), -1e30, tl.float32)
    sums = tl.zeros((PAGE // TILES_PER_PAGE, GROUP_PAD), tl.float32)
    acc = tl.zeros((DIM, GROUP_PAD), tl.float32)

    KEYS: tl.constexpr = PAGE // TILES_PER_PAGE
    num_tiles = tl.cdiv(seq_len, KEYS)
    per_split = tl.cdiv(num_tiles, num_splits)
    first = split * per_split
    for tile in tl.range(first, min(first + per_split, num_tiles), num_stages=NUM_STAGES):
        page = tl.load(page_table_ptr + tile // TILES_PER_PAGE).to(tl.int64)
        k_ptr = lane_ptr + page * stride_page + tile % TILES_PER_PAGE * KEYS * stride_row
        peak, sums, acc = attend_tile(
            queries, k_ptr, k_ptr + stride_value, stride_row, seq_len - tile * KEYS, peak, sums, acc, scale_log2, KEYS, DIM
        )

    total = tl.sum(sums, 0)
    unit = b * NUM_KV_HEADS + head
    if not SPLIT:
        out_ptr += b * stride_out_token + head * GROUP * stride_out_head
        store_output(out_ptr, stride_out_head, total, acc, 0, GROUP, DIM, GROUP_PAD)
    else:
        partial = unit * num_splits + split
        acc_ptr += partial * DIM * GROUP_PAD
        store_partial(acc_ptr, stats_ptr + partial * 2 * GROUP_PAD, peak, total, acc, DIM, GROUP_PAD)


def _config(num_units: int, max_blocks: int) -> DenseConfig:
    """About two programs per multiprocessor with a deep pipeline each, none of less than two pages."""
    return DenseConfig(num_splits=max(1, min(max_blocks // 2, 264 // num_units)), tiles_per_page=2, num_stages=5, num_warps=4)


def dense_decode(
    q: Tensor, kv_lane: Tensor, batch: AttentionBatch, scale: float, out: Tensor, config: DenseConfig | None = None
) -> None:
    """Attend to the whole context, B single-token sequences.

    Args:
        q: [B, Hq, D].
        kv_lane: [P, Hkv, 2, page, D].
        batch: B sequences of one query token.
        scale: factor of the scores.
        out: [B, Hq, D], written.
        config: how to run; chosen by shape when None.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads = kv_lane.shape[1]
    group = num_heads // num_kv_heads
    group_pad = max(MIN_SIDE, next_power_of_2(group))
    num_units = num_tokens * num_kv_heads
    config = config or _config(num_units, cdiv(batch.max_seq_len, batch.page_size))
    num_splits = config.num_splits
    partials = Partials.empty(num_units, num_splits, dim, group_pad, q.device)
    _dense_decode_kernel[(num_units * num_splits,)](
        q,
        kv_lane,
        batch.page_table,
        batch.seq_lens,
        partials.acc,
        partials.stats,
        out,
        q.stride(0),
        q.stride(1),
        kv_lane.stride(0),
        kv_lane.stride(1),
        kv_lane.stride(2),
        kv_lane.stride(3),
        batch.page_table.stride(0),
        out.stride(0),
        out.stride(1),
        num_splits,
        scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        DIM=dim,
        PAGE=batch.page_size,
        TILES_PER_PAGE=min(config.tiles_per_page, max(1, batch.page_size // MIN_SIDE)),
        SPLIT=num_splits > 1,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **pdl_options(q.device),
    )
    if num_splits > 1:
        merge(partials, out, num_kv_heads)
