"""Work lists of sparse prefill attention, built on the device from a selection.

Queries are cut into tiles of `TILE` neighbours. A block that at least `min_members` of a tile's queries chose goes to the
tile's list (tile-major work: the page is read once per tile and queries that did not choose it are masked). Every other choice
is a leftover and is served page-major: leftovers of all tiles are sorted by (KV head, page), and a page is read once for them.
Neighbouring queries that agree give long lists and few leftovers, independent ones the opposite; no host decision is needed.

The own block never counts as a choice: the tile kernel always attends to it, and it alone needs a causal mask.
Slots in the sorted order are handed out by atomics; results do not depend on them, because every leftover has its own place in
the partial results.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv, next_power_of_2
from server.kernels.query_tiles import locate_query_tile, num_query_tiles, padded_num_seqs, store_tile_record

UNIT = 64  # leftovers of one page that one unit of page-major work serves
_NUM_TOTALS = 4  # two, padded so that the page counts behind them are aligned
_KEYS_PER_PROGRAM = 1024
_CHOICES_PER_PROGRAM = 1024


@dataclass(frozen=True)
class SparsePlan:
    """Work lists. Leftover r of token t for KV head h has the number (h * T + t) * R + r, R = topk - 1.

    Attributes:
        tile: queries per tile.
        num_tiles: host-side bound of the number of tiles.
        max_leftovers: R, leftovers a query can have per KV head; 0 when there is no page-major work.
        list_pages: [num_tiles, Hkv, L] int32 page ids of a tile's shared blocks.
        list_members: [num_tiles, Hkv, L] int32, bit i set when query i of the tile chose the block.
        records: [num_tiles, Hkv, 8] int32, see `store_tile_record`; with the most leftovers that one of the queries has.
        num_leftovers: [Hkv, T] int32 per query.
        leftovers: [Hkv * T * R] int32 leftover numbers sorted by (KV head, page).
        unit_page: [U] int32, KV head * P + page of every unit of page-major work.
        unit_begin: [U] int32, first of its entries in `leftovers`.
        unit_len: [U] int32, how many, <= UNIT.
        totals: [2] int32, leftovers and units that exist; empty when there is no page-major work.
    """

    tile: int
    num_tiles: int
    max_leftovers: int
    list_pages: Tensor
    list_members: Tensor
    records: Tensor
    num_leftovers: Tensor
    leftovers: Tensor
    unit_page: Tensor
    unit_begin: Tensor
    unit_len: Tensor
    totals: Tensor


@direct_launch
@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "num_pages", "stride_sh", "stride_pb"],
    do_not_specialize_on_alignment=["selection_ptr", "query_start_ptr", "seq_lens_ptr", "page_table_ptr"],
)
def _list_kernel(
    selection_ptr,
    query_start_ptr,
    seq_lens_ptr,
    page_table_ptr,
    records_ptr,
    list_pages_ptr,
    list_members_ptr,
    num_leftovers_ptr,
    leftover_page_ptr,
    leftover_rank_ptr,
    page_count_ptr,
    num_seqs,
    num_tokens,
    num_pages,
    stride_sh,
    stride_st,
    stride_pb,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MIN_MEMBERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Grid (tiles, Hkv). Sorts a tile's choices into shared blocks and leftovers, and ranks leftovers within their page."""
    CHOICES: tl.constexpr = TILE * TOPK_PAD
    R: tl.constexpr = TOPK - 1
    i_tile, i_h = tl.program_id(0), tl.program_id(1)
    i_list = (i_tile * tl.num_programs(1) + i_h).to(tl.int64)
    p_record = records_ptr + i_list * 8
    i_seq, first, begin, end, token_shift = locate_query_tile(query_start_ptr, seq_lens_ptr, num_seqs, i_tile, TILE, BLOCK_B)
    if end == 0:
        store_tile_record(p_record, 0, 0, 0, 0, 0, 0, 0, 0)
        return
    own = first // PAGE
    p_pages = page_table_ptr + i_seq.to(tl.int64) * stride_pb
    p_selection = selection_ptr + i_h.to(tl.int64) * stride_sh + (first + token_shift).to(tl.int64) * stride_st
    o_c = tl.arange(0, CHOICES)
    o_q = o_c // TOPK_PAD
    o_k = o_c % TOPK_PAD
    o_pos = first + o_q
    m_c = (o_pos >= begin) & (o_pos < end) & (o_k < TOPK)
    b_block = tl.load(p_selection + o_q.to(tl.int64) * stride_st + o_k, mask=m_c, other=-1)
    m_c = (b_block >= 0) & (b_block < own)
    # Which of the tile's queries chose the same block: a bit per query. A query chooses a block at most once.
    o_s = tl.arange(0, TOPK_PAD)
    b_members = tl.zeros([CHOICES], tl.int32)
    b_count = tl.zeros([CHOICES], tl.int32)
    for q in tl.static_range(TILE):
        o_p = first + q + tl.zeros_like(o_s)
        m_s = (o_p >= begin) & (o_p < end) & (o_s < TOPK)
        b_other = tl.load(p_selection + q * stride_st + o_s, mask=m_s, other=-1)
        chose = tl.max((b_other[:, None] == b_block[None, :]).to(tl.int32), 0)
        b_members |= chose << q
        b_count += chose
    shared = m_c & (b_count >= MIN_MEMBERS)
    head = shared & ((b_members & ((1 << o_q) - 1)) == 0)  # the first query that chose it
    b_place = tl.cumsum(head.to(tl.int32), 0) - 1
    b_page = tl.load(p_pages + b_block, mask=m_c, other=0)
    tl.store(list_pages_ptr + i_list * CHOICES + b_place, b_page, mask=head)
    tl.store(list_members_ptr + i_list * CHOICES + b_place, b_members, mask=head)
    num_left = 0
    if MIN_MEMBERS > 1:
        left = m_c & (shared == 0)
        b_left = tl.reshape(left.to(tl.int32), [TILE, TOPK_PAD])
        b_r = tl.reshape(tl.cumsum(b_left, 1), [CHOICES]) - 1
        b_num = tl.sum(b_left, 1)
        num_left = tl.max(b_num, 0)
        b_key = i_h * num_pages + b_page
        b_rank = tl.atomic_add(page_count_ptr + b_key, 1, mask=left, sem="relaxed")
        row = i_h * num_tokens + first + token_shift
        o_left = (row + o_q) * R + b_r
        tl.store(leftover_page_ptr + o_left, b_key, mask=left)
        tl.store(leftover_rank_ptr + o_left, b_rank, mask=left)
        o_t = tl.arange(0, TILE)
        tl.store(num_leftovers_ptr + row + o_t, b_num, mask=(first + o_t >= begin) & (first + o_t < end))
    own_page = tl.load(p_pages + own)
    num_listed = tl.sum(head.to(tl.int32), 0)
    store_tile_record(p_record, first, begin, end, token_shift, own_page, num_listed, num_left, i_seq)


@direct_launch
@triton.jit(do_not_specialize=["num_keys"])
def _unit_kernel(
    page_count_ptr,
    page_begin_ptr,
    unit_page_ptr,
    unit_begin_ptr,
    unit_len_ptr,
    totals_ptr,
    num_keys,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid over (KV head, page) keys: gives every page its range of the sorted leftovers and cuts the range into units."""
    o_key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_count = tl.load(page_count_ptr + o_key, mask=o_key < num_keys, other=0)
    b_units = (b_count + UNIT - 1) // UNIT
    num_units = tl.sum(b_units, 0)
    if num_units == 0:
        return
    base = tl.atomic_add(totals_ptr, tl.sum(b_count, 0), sem="relaxed")
    unit_base = tl.atomic_add(totals_ptr + 1, num_units, sem="relaxed")
    b_begin = base + tl.cumsum(b_count, 0) - b_count
    b_unit = unit_base + tl.cumsum(b_units, 0) - b_units
    tl.store(page_begin_ptr + o_key, b_begin, mask=b_count > 0)
    for i in range(tl.max(b_units, 0)):
        m_unit = i < b_units
        tl.store(unit_page_ptr + b_unit + i, o_key, mask=m_unit)
        tl.store(unit_begin_ptr + b_unit + i, b_begin + i * UNIT, mask=m_unit)
        tl.store(unit_len_ptr + b_unit + i, tl.minimum(UNIT, b_count - i * UNIT), mask=m_unit)


@direct_launch
@triton.jit(do_not_specialize=["num_slots"])
def _sort_kernel(
    num_leftovers_ptr,
    leftover_page_ptr,
    leftover_rank_ptr,
    page_begin_ptr,
    leftovers_ptr,
    num_slots,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid over all leftover numbers: puts each existing one at its place in the sorted order."""
    o_left = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_left = o_left < num_slots
    b_num = tl.load(num_leftovers_ptr + o_left // R, mask=m_left, other=0)
    m_left = m_left & (o_left % R < b_num)
    b_key = tl.load(leftover_page_ptr + o_left, mask=m_left, other=0)
    b_rank = tl.load(leftover_rank_ptr + o_left, mask=m_left, other=0)
    b_begin = tl.load(page_begin_ptr + b_key, mask=m_left, other=0)
    tl.store(leftovers_ptr + b_begin + b_rank, o_left, mask=m_left)


def _carve(device: torch.device, *lengths: int) -> list[Tensor]:
    """int32 tensors from one allocation, 16-byte aligned: a step builds a plan per layer, and the host must stay ahead."""
    padded = [(length + 3) // 4 * 4 for length in lengths]
    parts = torch.split(torch.empty(sum(padded), dtype=torch.int32, device=device), padded)
    sizes = zip(parts, padded, lengths, strict=True)
    return [part if size == length else part[:length] for part, size, length in sizes]


def build_plan(selection: Tensor, batch: AttentionBatch, num_pages: int, tile: int, min_members: int) -> SparsePlan:
    """Build the work lists of a prefill batch; five launches at most, no host synchronisation.

    Args:
        selection: [Hkv, T, topk] int32.
        batch: prefill sequences.
        num_pages: pages of the lane, P; Hkv * P fits in 31 bits.
        tile: queries per tile, a power of two that divides the page and is at most 32.
        min_members: queries of a tile that make a block shared; 1 leaves nothing for page-major work.
    """
    num_heads, num_tokens, topk = selection.shape
    num_tiles = num_query_tiles(batch, tile)
    topk_pad = next_power_of_2(topk)
    width = tile * topk_pad
    num_keys = num_heads * num_pages
    max_leftovers = topk - 1 if min_members > 1 else 0
    num_slots = num_heads * num_tokens * max_leftovers
    assert max(num_keys, num_slots) < 2**31
    max_units = min(num_slots, num_slots // UNIT + num_keys)

    num_entries = num_tiles * num_heads * width
    counters, pages, members, records, num_leftovers, leftovers, leftover_page, leftover_rank, *units, page_begin = _carve(
        selection.device,
        *(_NUM_TOTALS + num_keys if max_leftovers else 0, num_entries, num_entries, num_tiles * num_heads * 8),
        *(num_heads * num_tokens, num_slots, num_slots, num_slots),
        *(max_units, max_units, max_units, num_keys if max_leftovers else 0),
    )
    totals, page_count = counters[:2], counters[_NUM_TOTALS:]
    if max_leftovers:
        counters.zero_()
    plan = SparsePlan(
        tile=tile,
        num_tiles=num_tiles,
        max_leftovers=max_leftovers,
        list_pages=pages.view(num_tiles, num_heads, width),
        list_members=members.view(num_tiles, num_heads, width),
        records=records.view(num_tiles, num_heads, 8),
        num_leftovers=num_leftovers.view(num_heads, num_tokens),
        leftovers=leftovers,
        unit_page=units[0],
        unit_begin=units[1],
        unit_len=units[2],
        totals=totals,
    )
    _list_kernel[(num_tiles, num_heads)](
        selection,
        batch.query_start,
        batch.seq_lens,
        batch.page_table,
        plan.records,
        plan.list_pages,
        plan.list_members,
        plan.num_leftovers,
        leftover_page,
        leftover_rank,
        page_count,
        batch.seq_lens.shape[0],
        num_tokens,
        num_pages,
        selection.stride(0),
        selection.stride(1),
        batch.page_table.stride(0),
        PAGE=batch.page_size,
        TOPK=topk,
        TOPK_PAD=topk_pad,
        TILE=tile,
        MIN_MEMBERS=min_members,
        BLOCK_B=padded_num_seqs(batch),
        num_warps=1,
    )
    if max_leftovers:
        _sort_leftovers(plan, page_count, page_begin, leftover_page, leftover_rank)
    return plan


def _sort_leftovers(
    plan: SparsePlan, page_count: Tensor, page_begin: Tensor, leftover_page: Tensor, leftover_rank: Tensor
) -> None:
    """Fill `leftovers` and the units from every leftover's page and its rank among that page's."""
    num_keys, num_slots = len(page_count), len(plan.leftovers)
    _unit_kernel[(cdiv(num_keys, _KEYS_PER_PROGRAM),)](
        page_count,
        page_begin,
        plan.unit_page,
        plan.unit_begin,
        plan.unit_len,
        plan.totals,
        num_keys,
        UNIT=UNIT,
        BLOCK=_KEYS_PER_PROGRAM,
    )
    _sort_kernel[(cdiv(num_slots, _CHOICES_PER_PROGRAM),)](
        plan.num_leftovers,
        leftover_page,
        leftover_rank,
        page_begin,
        plan.leftovers,
        num_slots,
        R=plan.max_leftovers,
        BLOCK=_CHOICES_PER_PROGRAM,
    )
