"""Attention of single-token sequences over their selected pages, which may be on the GPU or in pinned host memory.

A unit is a sequence and KV head. Its tiles (pages, or parts of a page) are cut over programs; a second, tiny launch merges
their partial results where there are any.
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
from server.kernels.integers import next_power_of_2
from server.kernels.launch import pdl_options, wait_for_inputs
from server.kernels.selection_rule import SelectionRule
from server.kernels.topk_keys import select_blocks, topk_config


@dataclass(frozen=True)
class HostTier:
    """Where the tiles of a page live when the sparse lane on the GPU is only a cache of a larger one in host memory.

    Attributes:
        host_lane: [num_host_slots, Hkv, 2, page, D], pinned, strides as in the GPU's lane; read in place by the kernel.
        slot_of_page: [P] int32 on the GPU: slot >= 0 of the GPU's lane, or -1 - host slot.
    """

    host_lane: Tensor
    slot_of_page: Tensor


@dataclass(frozen=True)
class SparseConfig:
    """How the pages of a unit are cut over programs, and how these run."""

    num_splits: int
    tiles_per_page: int
    num_stages: int
    num_warps: int


@direct_launch
@triton.jit(do_not_specialize=["num_splits", "stride_table"])
def _sparse_decode_kernel(
    q_ptr,
    lane_ptr,
    selection_ptr,
    page_table_ptr,
    seq_lens_ptr,
    slot_of_page_ptr,
    acc_ptr,
    stats_ptr,
    out_ptr,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_head,
    stride_value,
    stride_row,
    stride_selection_head,
    stride_selection_token,
    stride_table,
    stride_out_token,
    stride_out_head,
    host_offset,
    num_splits,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    TILES_PER_PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HOST_TIER: tl.constexpr,
    SELECT: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    P: tl.constexpr,
    MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * NUM_KV_HEADS * num_splits,).

    `acc` [units, num_splits, DIM, GROUP_PAD] and `stats` [units, num_splits, 2, GROUP_PAD] are fp32 scratch. `host_offset` is
    the distance in elements from the GPU's lane to the host's: both are one address space to the kernel.
    """
    KEYS: tl.constexpr = PAGE // TILES_PER_PAGE
    unit, split = (tl.program_id(0) // num_splits).to(tl.int64), tl.program_id(0) % num_splits
    b, head = unit // NUM_KV_HEADS, unit % NUM_KV_HEADS
    wait_for_inputs(PDL)
    seq_len = tl.load(seq_lens_ptr + b)
    queries = load_group(q_ptr + b * stride_q_token + head * GROUP * stride_q_head, stride_q_head, GROUP, DIM, GROUP_PAD)
    choices = tl.arange(0, WIDTH)
    selection_ptr += head * stride_selection_head + b * stride_selection_token
    if SELECT:
        blocks = select_blocks(selection_ptr, tl.cdiv(seq_len, PAGE), TOPK, WIDTH, NUM_INIT, NUM_LOCAL, P, MAX)
    else:
        blocks = tl.load(selection_ptr + choices, mask=choices < TOPK, other=-1)
    slots = tl.load(page_table_ptr + b * stride_table + tl.maximum(blocks, 0))
    if HOST_TIER:
        slots = tl.load(slot_of_page_ptr + slots)
    num_keys = tl.where(blocks >= 0, seq_len - blocks * PAGE, 0)  # [WIDTH], more than a page where the page is full
    lane_ptr += head * stride_head
    peak = tl.full((GROUP_PAD,), -1e30, tl.float32)
    sums = tl.zeros((KEYS, GROUP_PAD), tl.float32)
    acc = tl.zeros((DIM, GROUP_PAD), tl.float32)

    if ONE_TILE:
        first_tile = split
        # Known without the length, which shortens the chain of loads. The useless bound keeps the loop a loop, whose copies of
        # keys and values are both in flight before the first product.
        last_tile = min(split + 1, TOPK * TILES_PER_PAGE)
    else:
        num_tiles = min(tl.cdiv(seq_len, PAGE), TOPK) * TILES_PER_PAGE
        per_split = tl.cdiv(num_tiles, num_splits)
        first_tile = split * per_split
        last_tile = min(first_tile + per_split, num_tiles)
    for tile in tl.range(first_tile, last_tile, num_stages=NUM_STAGES):
        here = choices == tile // TILES_PER_PAGE
        start = tile % TILES_PER_PAGE * KEYS
        slot = tl.sum(tl.where(here, slots, 0), 0).to(tl.int64)
        if HOST_TIER:
            base = tl.where(slot < 0, host_offset + (-1 - slot) * stride_page, slot * stride_page)
        else:
            base = slot * stride_page
        keys_left = tl.sum(tl.where(here, num_keys, 0), 0) - start
        k_ptr = lane_ptr + base + start * stride_row
        peak, sums, acc = attend_tile(
            queries, k_ptr, k_ptr + stride_value, stride_row, keys_left, peak, sums, acc, scale_log2, KEYS, DIM
        )

    total = tl.sum(sums, 0)
    if not SPLIT:
        out_ptr += b * stride_out_token + head * GROUP * stride_out_head
        store_output(out_ptr, stride_out_head, total, acc, 0, GROUP, DIM, GROUP_PAD)
    else:
        partial = unit * num_splits + split
        acc_ptr += partial * DIM * GROUP_PAD
        store_partial(acc_ptr, stats_ptr + partial * 2 * GROUP_PAD, peak, total, acc, DIM, GROUP_PAD)


def _config(num_units: int, topk: int) -> SparseConfig:
    """A wave of the GPU at most, since every further split costs a partial result."""
    if num_units * topk <= 132:
        return SparseConfig(num_splits=next_power_of_2(topk), tiles_per_page=1, num_stages=2, num_warps=4)
    num_splits = max(1, min(topk, 132 // num_units))
    return SparseConfig(num_splits=num_splits, tiles_per_page=2, num_stages=3, num_warps=4)


def sparse_decode(
    q: Tensor,
    kv_lane: Tensor,
    selection: Tensor,
    batch: AttentionBatch,
    scale: float,
    out: Tensor,
    host_tier: HostTier | None = None,
    rule: SelectionRule | None = None,
    config: SparseConfig | None = None,
) -> None:
    """Attend to selected pages, B single-token sequences.

    Args:
        q: [B, Hq, D].
        kv_lane: [P, Hkv, 2, page, D]; with a host tier [num_slots, Hkv, 2, page, D].
        selection: [Hkv, B, topk] int32 block ids, -1 behind the last; with a rule scores [Hkv, B, max_blocks] fp32.
        batch: B sequences of one query token.
        scale: factor of the scores.
        out: [B, Hq, D], written.
        host_tier: slot table and pinned lane when pages may live in host memory; None costs nothing.
        rule: how every program selects from scores by itself, which saves a launch; None when that is done.
        config: how to run; chosen by shape when None.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, max_blocks = kv_lane.shape[1], selection.shape[-1]
    topk = rule.topk if rule else max_blocks
    width = next_power_of_2(topk)
    group = num_heads // num_kv_heads
    group_pad = max(MIN_SIDE, next_power_of_2(group))
    num_units = num_tokens * num_kv_heads
    config = config or _config(num_units, topk)
    num_splits = config.num_splits
    tiles_per_page = min(config.tiles_per_page, max(1, batch.page_size // MIN_SIDE))
    partials = Partials.empty(num_units, num_splits, dim, group_pad, q.device)
    progressions = topk_config(max_blocks, width).progressions if rule else width
    _sparse_decode_kernel[(num_units * num_splits,)](
        q,
        kv_lane,
        selection,
        batch.page_table,
        batch.seq_lens,
        host_tier.slot_of_page if host_tier else batch.page_table,
        partials.acc,
        partials.stats,
        out,
        q.stride(0),
        q.stride(1),
        kv_lane.stride(0),
        kv_lane.stride(1),
        kv_lane.stride(2),
        kv_lane.stride(3),
        selection.stride(0),
        selection.stride(1),
        batch.page_table.stride(0),
        out.stride(0),
        out.stride(1),
        _host_offset(kv_lane, host_tier) if host_tier else 0,
        num_splits,
        scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        DIM=dim,
        PAGE=batch.page_size,
        TOPK=topk,
        WIDTH=width,
        SELECT=rule is not None,
        NUM_INIT=rule.num_init_blocks if rule else 0,
        NUM_LOCAL=rule.num_local_blocks if rule else 0,
        P=progressions,
        MAX=max(progressions, next_power_of_2(max_blocks)),
        TILES_PER_PAGE=tiles_per_page,
        SPLIT=num_splits > 1,
        ONE_TILE=num_splits >= topk * tiles_per_page,
        NUM_STAGES=config.num_stages,
        HOST_TIER=host_tier is not None,
        num_warps=config.num_warps,
        **pdl_options(q.device),
    )
    if num_splits > 1:
        merge(partials, out, num_kv_heads)


def _host_offset(kv_lane: Tensor, tier: HostTier) -> int:
    """Elements from the GPU's lane to the host's; ValueError if the kernel could not read both alike."""
    if tier.host_lane.stride() != kv_lane.stride() or tier.host_lane.dtype != kv_lane.dtype:
        raise ValueError(f"host lane of strides {tier.host_lane.stride()} beside one of strides {kv_lane.stride()}")
    num_bytes = tier.host_lane.data_ptr() - kv_lane.data_ptr()
    if num_bytes % (16 * kv_lane.element_size()):
        raise ValueError(f"the lanes are {num_bytes} bytes apart, not a multiple of 16 elements")
    return num_bytes // kv_lane.element_size()
