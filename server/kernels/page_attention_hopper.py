"""Attention of query tiles over lists of pages on Hopper, for sparse tiles and for dense prefill.

A tile is 8 queries x 16 query heads of one KV head = 128 rows. One copy warp feeds K and V pages; two groups of four warps own
64 rows each and run independently. Inside a group the score product of the next page is issued before the value product of
the last one, so that the softmax overlaps a matrix product. Programs take several tiles in turn, and the copy warp runs ahead
into the next tile while the groups finish the last.

The tile's own page comes first and is causally masked. Partial results that page-major work left for a tile's queries travel
through the same ring as K tiles do and are merged at the end.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from server.kernels.attention_batch import AttentionBatch
from server.kernels.device import num_multiprocessors
from server.kernels.direct_launch import direct_launch
from server.kernels.hopper import CopyDescriptor, box_descriptor, copy_tile, row_descriptor
from server.kernels.query_tiles import num_query_tiles, tile_records
from server.kernels.sparse_plan import SparsePlan

_STAGES = 3
_GROUP = 16
_TILE = 8


@gluon.jit
def _work_item(i_work, num_tiles, num_heads, SPARSE: gl.constexpr):
    """(record number, KV head). Work goes head by head, so that what runs at a time shares its pages in L2.

    Dense tiles go by descending length, which keeps the end of the work even.
    """
    i_h = i_work // num_tiles
    i_tile = i_work % num_tiles
    i_record = i_tile * num_heads + i_h if SPARSE else num_tiles - 1 - i_tile
    return i_record, i_h


@gluon.jit
def _copy_masked_values(kv_ptr, row, num_written, v_buf, PAGE: gl.constexpr, D: gl.constexpr):
    """Copy a V tile whose slots from `num_written` on were never written, as zeros: 0 * NaN would reach the result."""
    STEP: gl.constexpr = 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    o_n = gl.arange(0, STEP, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for n in gl.static_range(0, PAGE, STEP):
        p_v = kv_ptr + (row.to(gl.int64) + n + o_n)[:, None] * D + o_d[None, :]
        v_buf.slice(n, STEP).store(gl.load(p_v, mask=(n + o_n < num_written)[:, None], other=0.0))
        fence_async_shared()  # also keeps the compiler from loading all pieces at once, for which a copy warp lacks registers


@gluon.jit
def _copy_pages(
    kv_desc, left_desc, kv_ptr, records_ptr, page_table_ptr, list_pages_ptr, k_bufs, v_bufs, k_ready, k_empty, v_ready,
    v_empty, num_work, num_tiles, num_heads, num_tokens, stride_pb,
    D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, LEFTOVERS: gl.constexpr,
    SPARSE: gl.constexpr,
):  # fmt: skip
    i_k = 0
    i_v = 0
    for i_work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        i_record, i_h = _work_item(i_work, num_tiles, num_heads, SPARSE)
        p_record = records_ptr + i_record * 8
        first = gl.load(p_record)
        end = gl.load(p_record + 2)
        page = gl.load(p_record + 4)
        num_listed = gl.load(p_record + 5)
        if SPARSE:
            pages_ptr = list_pages_ptr + i_record.to(gl.int64) * WIDTH
        else:
            pages_ptr = page_table_ptr + gl.load(p_record + 7).to(gl.int64) * stride_pb
        if end > 0:
            num_written = end - (first // PAGE) * PAGE
            for i in range(num_listed + 1):
                row = (page * num_heads + i_h) * (2 * PAGE)
                page = gl.load(pages_ptr + i, mask=i < num_listed, other=0)
                k_stage = i_k % STAGES
                mbarrier.wait(k_empty.index(k_stage), ((i_k // STAGES) & 1) ^ 1)
                mbarrier.expect(k_ready.index(k_stage), kv_desc.block_type.nbytes)
                copy_tile(kv_desc, [row, 0], k_ready.index(k_stage), k_bufs.index(k_stage))
                v_stage = i_v % STAGES
                mbarrier.wait(v_empty.index(v_stage), ((i_v // STAGES) & 1) ^ 1)
                if (i == 0) & (num_written < PAGE):
                    _copy_masked_values(kv_ptr, row + PAGE, num_written, v_bufs.index(v_stage), PAGE, D)
                    mbarrier.arrive(v_ready.index(v_stage))
                else:
                    mbarrier.expect(v_ready.index(v_stage), kv_desc.block_type.nbytes)
                    copy_tile(kv_desc, [row + PAGE, 0], v_ready.index(v_stage), v_bufs.index(v_stage))
                i_k += 1
                i_v += 1
            if LEFTOVERS:
                left_row = i_h * num_tokens + first + gl.load(p_record + 3)
                for r in range(gl.load(p_record + 6)):
                    k_stage = i_k % STAGES
                    mbarrier.wait(k_empty.index(k_stage), ((i_k // STAGES) & 1) ^ 1)
                    mbarrier.expect(k_ready.index(k_stage), left_desc.block_type.nbytes)
                    left_buf = k_bufs.index(k_stage).reshape([8, 1, 16, 128])
                    copy_tile(left_desc, [left_row, r, 0, 0], k_ready.index(k_stage), left_buf)
                    i_k += 1


@gluon.jit
def _attend_rows(
    q_ptr, out_ptr, lse_ptr, num_leftovers_ptr, records_ptr, members_ptr, q_bufs, k_bufs, v_bufs, k_ready, k_empty, v_ready,
    v_empty, num_work, num_tiles, num_heads, num_tokens, scale_log2, stride_qt, stride_qh, stride_ot, stride_oh,
    HALF: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    WIDTH: gl.constexpr, R: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    QUERIES: gl.constexpr = ROWS // G
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, mma_s)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, mma_o)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, load_layout))
    o_r = gl.arange(0, ROWS, layout=row_layout)
    o_g = o_r % G
    o_q = HALF * QUERIES + o_r // G
    zero_s = gl.zeros([ROWS, PAGE], gl.float32, layout=mma_s)
    q_buf = q_bufs.index(HALF)

    i_k = 0
    i_v = 0
    for i_work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        i_record, i_h = _work_item(i_work, num_tiles, num_heads, SPARSE)
        p_record = records_ptr + i_record * 8
        first = gl.load(p_record)
        begin = gl.load(p_record + 1)
        end = gl.load(p_record + 2)
        token_shift = gl.load(p_record + 3)
        num_listed = gl.load(p_record + 5)
        num_left = gl.load(p_record + 6)
        if end > 0:
            p_members = members_ptr + i_record.to(gl.int64) * WIDTH
            members = 0
            if SPARSE:
                members = gl.load(p_members, mask=num_listed > 0, other=0)
            o_row_pos = first + HALF * QUERIES + o_row // G
            m_row = (o_row_pos >= begin) & (o_row_pos < end)
            o_row_t = (o_row_pos + token_shift).to(gl.int64)
            o_row_h = (i_h * G + o_row % G).to(gl.int64)
            p_q = q_ptr + (o_row_t * stride_qt + o_row_h * stride_qh)[:, None] + o_d[None, :]
            q_buf.store(gl.load(p_q, mask=m_row[:, None], other=0.0))
            fence_async_shared()
            o_pos = first + o_q
            o_n = (first // PAGE) * PAGE + gl.arange(0, PAGE, layout=gl.SliceLayout(0, mma_s))

            mbarrier.wait(k_ready.index(i_k % STAGES), (i_k // STAGES) & 1)
            b_s = warpgroup_mma(q_buf, k_bufs.index(i_k % STAGES).permute((1, 0)), zero_s, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            mbarrier.arrive(k_empty.index(i_k % STAGES))
            b_s = gl.where(o_n[None, :] <= o_pos[:, None], b_s * scale_log2, float("-inf"))
            b_m = gl.max(b_s, 1)
            b_p = gl.exp2(b_s - b_m[:, None])
            b_l = gl.sum(b_p, 1)
            b_p16 = gl.convert_layout(b_p.to(dtype), p_layout)
            b_acc = gl.zeros([ROWS, D], gl.float32, layout=mma_o)
            for i in range(1, num_listed + 1):
                k_stage = (i_k + i) % STAGES
                v_stage = (i_v + i - 1) % STAGES
                mbarrier.wait(k_ready.index(k_stage), ((i_k + i) // STAGES) & 1)
                b_s = warpgroup_mma(q_buf, k_bufs.index(k_stage).permute((1, 0)), zero_s, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(v_stage), ((i_v + i - 1) // STAGES) & 1)
                b_acc = warpgroup_mma(b_p16, v_bufs.index(v_stage), b_acc, is_async=True)
                b_s = warpgroup_mma_wait(1, deps=(b_s,))
                mbarrier.arrive(k_empty.index(k_stage))
                b_max = gl.max(b_s, 1) * scale_log2
                if SPARSE:
                    # A row whose query did not choose the page keeps its maximum and gets exp2(-inf) = 0 everywhere.
                    member = ((members >> o_q) & 1) != 0
                    members = gl.load(p_members + gl.minimum(i, num_listed - 1))
                    b_new = gl.maximum(b_m, gl.where(member, b_max, float("-inf")))
                    b_shift = gl.where(member, b_new, float("inf"))
                else:
                    b_new = gl.maximum(b_m, b_max)
                    b_shift = b_new
                b_alpha = gl.exp2(b_m - b_new)
                b_p = gl.exp2(b_s * scale_log2 - b_shift[:, None])
                b_l = b_l * b_alpha + gl.sum(b_p, 1)
                b_m = b_new
                b_acc, b_p16 = warpgroup_mma_wait(0, deps=(b_acc, b_p16))
                mbarrier.arrive(v_empty.index(v_stage))
                b_acc = b_acc * gl.convert_layout(b_alpha, out_row_layout)[:, None]
                b_p16 = gl.convert_layout(b_p.to(dtype), p_layout)
            i_k += num_listed + 1
            i_v += num_listed + 1
            v_stage = (i_v - 1) % STAGES
            mbarrier.wait(v_ready.index(v_stage), ((i_v - 1) // STAGES) & 1)
            b_acc = warpgroup_mma(b_p16, v_bufs.index(v_stage), b_acc, is_async=True)
            b_acc, b_p16 = warpgroup_mma_wait(0, deps=(b_acc, b_p16))
            mbarrier.arrive(v_empty.index(v_stage))

            if R > 0:
                o_chunk_row = i_h * num_tokens + o_pos + token_shift
                b_num = gl.load(num_leftovers_ptr + o_chunk_row, mask=(o_pos >= begin) & (o_pos < end), other=0)
                p_lse = lse_ptr + o_chunk_row.to(gl.int64) * (R * G) + o_g
                b_lse = gl.load(p_lse, mask=b_num > 0, other=float("-inf"))
                for r in range(num_left):
                    k_stage = i_k % STAGES
                    b_new = gl.maximum(b_m, b_lse)
                    alpha = gl.convert_layout(gl.exp2(b_m - b_new), out_row_layout)[:, None]
                    b_weight = gl.exp2(b_lse - b_new)
                    b_lse = gl.load(p_lse + (r + 1) * G, mask=r + 1 < b_num, other=float("-inf"))
                    b_l = b_l * gl.exp2(b_m - b_new) + b_weight
                    b_m = b_new
                    mbarrier.wait(k_ready.index(k_stage), (i_k // STAGES) & 1)
                    b_o = k_bufs.index(k_stage).slice(HALF * ROWS, ROWS).load(mma_o).to(gl.float32)
                    mbarrier.arrive(k_empty.index(k_stage))
                    # Places of leftovers that a query does not have were never written.
                    m_left = gl.convert_layout(r < b_num, out_row_layout)[:, None]
                    weight = gl.convert_layout(b_weight, out_row_layout)[:, None]
                    b_acc = b_acc * alpha + gl.where(m_left, b_o, 0.0) * weight
                    i_k += 1

            b_o = b_acc / gl.convert_layout(b_l, out_row_layout)[:, None]
            q_buf.store(b_o.to(dtype))  # the queries are done with; rows leave as whole 16-byte pieces
            p_out = out_ptr + (o_row_t * stride_ot + o_row_h * stride_oh)[:, None] + o_d[None, :]
            gl.store(p_out, q_buf.load(load_layout), mask=m_row[:, None])


@direct_launch
@gluon.jit(
    do_not_specialize=["num_work", "num_tiles", "num_tokens", "stride_pb"],
    do_not_specialize_on_alignment=["lse_ptr", "num_leftovers_ptr", "page_table_ptr", "list_pages_ptr", "list_members_ptr"],
)
def _page_attention_kernel(
    q_ptr, kv_desc, left_desc, kv_ptr, out_ptr, lse_ptr, num_leftovers_ptr, records_ptr, page_table_ptr, list_pages_ptr,
    list_members_ptr, num_work, num_tiles, num_heads, num_tokens, scale_log2,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_pb,
    G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, R: gl.constexpr,
    SPARSE: gl.constexpr,
):  # fmt: skip
    """One-dimensional grid; program i takes the work items i, i + programs, ..."""
    ROWS: gl.constexpr = 64
    q_bufs = gl.allocate_shared_memory(kv_desc.dtype, [2, ROWS, D], kv_desc.layout)
    k_bufs = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, PAGE, D], kv_desc.layout)
    v_bufs = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, PAGE, D], kv_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _attend_rows,
                (
                    q_ptr, out_ptr, lse_ptr, num_leftovers_ptr, records_ptr, list_members_ptr, q_bufs, k_bufs, v_bufs,
                    k_ready, k_empty, v_ready, v_empty, num_work, num_tiles, num_heads, num_tokens, scale_log2,
                    stride_qt, stride_qh, stride_ot, stride_oh, 0, G, D, PAGE, ROWS, STAGES, WIDTH, R, SPARSE,
                ),
            ),
            (
                _attend_rows,
                (
                    q_ptr, out_ptr, lse_ptr, num_leftovers_ptr, records_ptr, list_members_ptr, q_bufs, k_bufs, v_bufs,
                    k_ready, k_empty, v_ready, v_empty, num_work, num_tiles, num_heads, num_tokens, scale_log2,
                    stride_qt, stride_qh, stride_ot, stride_oh, 1, G, D, PAGE, ROWS, STAGES, WIDTH, R, SPARSE,
                ),
            ),
            (
                _copy_pages,
                (
                    kv_desc, left_desc, kv_ptr, records_ptr, page_table_ptr, list_pages_ptr, k_bufs, v_bufs, k_ready,
                    k_empty, v_ready, v_empty, num_work, num_tiles, num_heads, num_tokens, stride_pb,
                    D, PAGE, STAGES, WIDTH, R > 0, SPARSE,
                ),
            ),
        ],
        [4, 1],
        [224, 64],
    )  # fmt: skip


def _leftover_descriptor(partial: Tensor, max_leftovers: int) -> CopyDescriptor:
    """Copy descriptor of partial results as [Hkv * T, R, G, D], in boxes of one leftover of `_TILE` neighbouring queries."""
    group, dim = partial.shape[1], partial.shape[2]
    shape = (partial.shape[0] // max_leftovers, max_leftovers, group, dim)
    return box_descriptor(partial, (_TILE, 1, group, dim), shape, (max_leftovers * group * dim, group * dim, dim, 1))


def attend_tiles_hopper(
    q: Tensor, kv_lane: Tensor, plan: SparsePlan, partial: Tensor, lse: Tensor, scale_log2: float, out: Tensor
) -> None:
    """The tile-major part of sparse prefill, and the merge of leftovers, for contiguous lanes in the production geometry.

    Args:
        q: [T, Hq, D].
        kv_lane: [P, Hkv, 2, page, D], contiguous.
        plan: work lists.
        partial: [Hkv * T * R, G, D] partial results by leftover number.
        lse: [Hkv * T * R, G] their log-sum-exp in units of log2.
        scale_log2: factor of the scores times log2(e).
        out: [T, Hq, D] to write into.
    """
    num_work = plan.num_tiles * kv_lane.shape[1]
    num_programs = min(num_work, num_multiprocessors(q.device))
    kv_desc = row_descriptor(kv_lane, kv_lane.shape[3])
    left_desc = _leftover_descriptor(partial, plan.max_leftovers) if plan.max_leftovers else kv_desc
    _page_attention_kernel[(num_programs,)](
        q,
        kv_desc,
        left_desc,
        kv_lane,
        out,
        lse,
        plan.num_leftovers,
        plan.records,
        plan.records,  # no page table: lists hold page ids
        plan.list_pages,
        plan.list_members,
        num_work,
        plan.num_tiles,
        kv_lane.shape[1],
        q.shape[0],
        scale_log2,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        0,
        G=_GROUP,
        D=kv_lane.shape[4],
        PAGE=kv_lane.shape[3],
        STAGES=_STAGES,
        WIDTH=plan.list_pages.shape[2],
        R=plan.max_leftovers,
        SPARSE=True,
        num_warps=4,
    )


def attend_densely_hopper(q: Tensor, kv_lane: Tensor, batch: AttentionBatch, scale_log2: float, out: Tensor) -> None:
    """Dense causal attention over all pages of each sequence; same geometry as `attend_tiles_hopper`."""
    num_tiles = num_query_tiles(batch, _TILE)
    num_work = num_tiles * kv_lane.shape[1]
    kv_desc = row_descriptor(kv_lane, kv_lane.shape[3])
    table = batch.page_table
    _page_attention_kernel[(num_work,)](
        q,
        kv_desc,
        kv_desc,
        kv_lane,
        out,
        table,  # no leftovers, no lists: these pointers are not followed
        table,
        tile_records(batch, _TILE),
        table,
        table,
        table,
        num_work,
        num_tiles,
        kv_lane.shape[1],
        q.shape[0],
        scale_log2,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        table.stride(0),
        G=_GROUP,
        D=kv_lane.shape[4],
        PAGE=kv_lane.shape[3],
        STAGES=_STAGES,
        WIDTH=1,
        R=0,
        SPARSE=False,
        num_warps=4,
    )
