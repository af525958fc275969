"""Page-major attention of leftovers on Hopper: K and V of a page stay in shared memory while all queries that chose it pass.

One copy warp prefetches the pages of the next unit. Two groups of four warps take turns at tiles of 4 leftovers x 16 query
heads = 64 rows; the queries of a group's next tile are on their way into registers while the current one is computed, also
across units.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from server.kernels.device import num_multiprocessors
from server.kernels.direct_launch import direct_launch
from server.kernels.hopper import copy_tile, row_descriptor
from server.kernels.sparse_plan import SparsePlan

_GROUP = 16


@gluon.jit
def _copy_units(kv_desc, k_bufs, v_bufs, ready, empty, unit_page_ptr, num_units, num_pages, num_heads, PAGE: gl.constexpr):
    for i_unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        i = i_unit // gl.num_programs(0)
        key = gl.load(unit_page_ptr + i_unit)
        row = ((key % num_pages) * num_heads + key // num_pages) * (2 * PAGE)
        stage = i % 2
        mbarrier.wait(empty.index(stage), ((i // 2) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), 2 * kv_desc.block_type.nbytes)
        copy_tile(kv_desc, [row, 0], ready.index(stage), k_bufs.index(stage))
        copy_tile(kv_desc, [row + PAGE, 0], ready.index(stage), v_bufs.index(stage))


@gluon.jit
def _attend_units(
    q_ptr, partial_ptr, lse_ptr, leftovers_ptr, unit_page_ptr, unit_begin_ptr, unit_len_ptr, q_bufs, k_bufs, v_bufs, ready,
    empty, num_units, num_pages, num_tokens, scale_log2, stride_qt, stride_qh,
    HALF: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr,
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
    p_q = q_ptr + ((o_row % G).to(gl.int64) * stride_qh)[:, None] + o_d[None, :]
    p_partial = partial_ptr + ((o_row % G) * D)[:, None] + o_d[None, :]
    zero_s = gl.zeros([ROWS, PAGE], gl.float32, layout=mma_s)
    zero_o = gl.zeros([ROWS, D], gl.float32, layout=mma_o)
    q_buf = q_bufs.index(HALF)

    i_unit = gl.program_id(0)
    exists = i_unit < num_units
    i_h = gl.load(unit_page_ptr + i_unit, mask=exists, other=0) // num_pages
    begin = gl.load(unit_begin_ptr + i_unit, mask=exists, other=0)
    end = begin + gl.load(unit_len_ptr + i_unit, mask=exists, other=0)
    position = begin + HALF * QUERIES
    b_left = gl.load(leftovers_ptr + position + o_row // G, mask=position + o_row // G < end, other=-1)
    o_t = b_left // R - i_h * num_tokens
    o_q = o_t.to(gl.int64) * stride_qt + (i_h * G).to(gl.int64) * stride_qh
    q_buf.store(gl.load(p_q + o_q[:, None], mask=(b_left >= 0)[:, None], other=0.0))
    fence_async_shared()
    i = 0
    while i_unit < num_units:
        i_unit += gl.num_programs(0)
        exists = i_unit < num_units
        next_h = gl.load(unit_page_ptr + i_unit, mask=exists, other=0) // num_pages
        next_begin = gl.load(unit_begin_ptr + i_unit, mask=exists, other=0)
        next_end = next_begin + gl.load(unit_len_ptr + i_unit, mask=exists, other=0)
        stage = i % 2
        mbarrier.wait(ready.index(stage), (i // 2) & 1)
        # A group without a tile in a short unit computes an empty one, so that what it prefetched stays in step.
        num_own = gl.maximum((end - begin - HALF * QUERIES + 2 * QUERIES - 1) // (2 * QUERIES), 1)
        for j in range(num_own):
            b_s = warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), zero_s, use_acc=False, is_async=True)
            position = begin + HALF * QUERIES + j * (2 * QUERIES)
            m_r = position + o_r // G < end
            b_number = gl.load(leftovers_ptr + position + o_r // G, mask=m_r, other=0)
            is_last = j == num_own - 1
            next_position = gl.where(is_last, next_begin + HALF * QUERIES, position + 2 * QUERIES)
            next_limit = gl.where(is_last, next_end, end)
            head = gl.where(is_last, next_h, i_h)
            m_next = next_position + o_row // G < next_limit
            b_next = gl.load(leftovers_ptr + next_position + o_row // G, mask=m_next, other=-1)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            b_m = gl.max(b_s, 1) * scale_log2
            b_p = gl.exp2(b_s * scale_log2 - b_m[:, None])
            b_l = gl.sum(b_p, 1)
            b_p16 = gl.convert_layout(b_p.to(dtype), p_layout)
            b_acc = warpgroup_mma(b_p16, v_bufs.index(stage), zero_o, use_acc=False, is_async=True)
            o_t = b_next // R - head * num_tokens
            o_q = o_t.to(gl.int64) * stride_qt + (head * G).to(gl.int64) * stride_qh
            b_q = gl.load(p_q + o_q[:, None], mask=(b_next >= 0)[:, None], other=0.0)
            gl.store(lse_ptr + b_number.to(gl.int64) * G + o_r % G, b_m + gl.log2(b_l), mask=m_r)
            b_acc, b_p16 = warpgroup_mma_wait(0, deps=(b_acc, b_p16))
            b_o = b_acc / gl.convert_layout(b_l, out_row_layout)[:, None]
            q_buf.store(b_o.to(dtype))
            p_row = p_partial + (b_left.to(gl.int64) * (G * D))[:, None]
            gl.store(p_row, q_buf.load(load_layout), mask=(b_left >= 0)[:, None], cache_modifier=".cs")
            q_buf.store(b_q)
            fence_async_shared()
            b_left = b_next
        mbarrier.arrive(empty.index(stage))
        i_h = next_h
        begin = next_begin
        end = next_end
        i += 1


@direct_launch
@gluon.jit(do_not_specialize=["num_pages", "num_tokens"])
def _page_major_hopper_kernel(
    q_ptr, kv_desc, partial_ptr, lse_ptr, leftovers_ptr, unit_page_ptr, unit_begin_ptr, unit_len_ptr, totals_ptr, num_pages,
    num_heads, num_tokens, scale_log2, stride_qt, stride_qh,
    G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """One-dimensional grid; program i takes the units i, i + programs, ..."""
    ROWS: gl.constexpr = 64
    num_units = gl.load(totals_ptr + 1)
    q_bufs = gl.allocate_shared_memory(kv_desc.dtype, [2, ROWS, D], kv_desc.layout)
    k_bufs = gl.allocate_shared_memory(kv_desc.dtype, [2, PAGE, D], kv_desc.layout)
    v_bufs = gl.allocate_shared_memory(kv_desc.dtype, [2, PAGE, D], kv_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _attend_units,
                (
                    q_ptr, partial_ptr, lse_ptr, leftovers_ptr, unit_page_ptr, unit_begin_ptr, unit_len_ptr, q_bufs, k_bufs,
                    v_bufs, ready, empty, num_units, num_pages, num_tokens, scale_log2, stride_qt, stride_qh,
                    0, G, D, PAGE, ROWS, R,
                ),
            ),
            (
                _attend_units,
                (
                    q_ptr, partial_ptr, lse_ptr, leftovers_ptr, unit_page_ptr, unit_begin_ptr, unit_len_ptr, q_bufs, k_bufs,
                    v_bufs, ready, empty, num_units, num_pages, num_tokens, scale_log2, stride_qt, stride_qh,
                    1, G, D, PAGE, ROWS, R,
                ),
            ),
            (
                _copy_units,
                (kv_desc, k_bufs, v_bufs, ready, empty, unit_page_ptr, num_units, num_pages, num_heads, PAGE),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def attend_leftovers_hopper(q: Tensor, kv_lane: Tensor, plan: SparsePlan, scale_log2: float) -> tuple[Tensor, Tensor]:
    """Partial results of all leftovers by number: [Hkv * T * R, G, D] in q's dtype, and log-sum-exp [Hkv * T * R, G] fp32."""
    num_pages, num_heads, _, page_size, head_dim = kv_lane.shape
    partial = q.new_empty((plan.leftovers.shape[0], _GROUP, head_dim))
    lse = q.new_empty((plan.leftovers.shape[0], _GROUP), dtype=torch.float32)
    if plan.max_leftovers == 0:
        return partial, lse
    num_programs = num_multiprocessors(q.device)
    _page_major_hopper_kernel[(num_programs,)](
        q,
        row_descriptor(kv_lane, page_size),
        partial,
        lse,
        plan.leftovers,
        plan.unit_page,
        plan.unit_begin,
        plan.unit_len,
        plan.totals,
        num_pages,
        num_heads,
        q.shape[0],
        scale_log2,
        q.stride(0),
        q.stride(1),
        G=_GROUP,
        D=head_dim,
        PAGE=page_size,
        R=plan.max_leftovers,
        num_warps=4,
    )
    return partial, lse
