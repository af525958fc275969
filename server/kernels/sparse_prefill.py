"""Sparse attention of prefill chunks: tile-major where neighbouring queries agree, page-major where they do not.

`sparse_plan` says which choice goes where. The page-major kernel loads K and V of a page once, attends every query that left
the page over, and writes a normalised partial result with its log-sum-exp. The tile kernel attends a tile of queries to its own
block and its shared blocks, all query heads of a KV head stacked as rows, merges the queries' partial results and writes the
output. Scores are kept in units of log2.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.device import num_multiprocessors
from server.kernels.direct_launch import direct_launch
from server.kernels.query_tiles import uses_hopper_kernels
from server.kernels.sparse_plan import SparsePlan, build_plan

LOG2_E = 1.4426950408889634
_TILE = 8
_MIN_MEMBERS = 3
_MIN_TOKENS_FOR_PAGE_MAJOR = 512  # shorter chunks share too few pages to pay for three more launches


@direct_launch
@triton.jit(do_not_specialize=["num_tokens", "num_pages"])
def _page_major_kernel(
    q_ptr,
    kv_ptr,
    partial_ptr,
    lse_ptr,
    leftovers_ptr,
    unit_page_ptr,
    unit_begin_ptr,
    unit_len_ptr,
    totals_ptr,
    num_tokens,
    num_pages,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_kc,
    stride_kn,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Persistent over units. Rows of a tile are QUERIES leftovers x G query heads."""
    ROWS: tl.constexpr = QUERIES * G
    o_r = tl.arange(0, ROWS)
    o_g = o_r % G
    o_d = tl.arange(0, D)
    o_n = tl.arange(0, PAGE)
    for i_unit in range(tl.program_id(0), tl.load(totals_ptr + 1), tl.num_programs(0)):
        key = tl.load(unit_page_ptr + i_unit)
        i_h = (key // num_pages).to(tl.int64)
        unit_begin = tl.load(unit_begin_ptr + i_unit)
        unit_len = tl.load(unit_len_ptr + i_unit)
        p_kv = kv_ptr + (key % num_pages).to(tl.int64) * stride_kp + i_h * stride_kh
        b_k = tl.load(p_kv + o_n[None, :] * stride_kn + o_d[:, None])
        b_v = tl.load(p_kv + stride_kc + o_n[:, None] * stride_kn + o_d[None, :])
        for i in range(0, unit_len, QUERIES):
            m_r = i + o_r // G < unit_len
            b_left = tl.load(leftovers_ptr + unit_begin + i + o_r // G, mask=m_r, other=0).to(tl.int64)
            b_t = b_left // R - i_h * num_tokens
            p_q = q_ptr + (b_t * stride_qt + (i_h * G + o_g) * stride_qh)[:, None] + o_d[None, :]
            b_q = tl.load(p_q, mask=m_r[:, None], other=0.0)
            b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
            b_m = tl.max(b_s, 1)
            b_p = tl.exp2(b_s - b_m[:, None])
            b_l = tl.sum(b_p, 1)
            b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee") / b_l[:, None]
            o_part = b_left * G + o_g
            tl.store(partial_ptr + o_part[:, None] * D + o_d[None, :], b_o.to(partial_ptr.dtype.element_ty), mask=m_r[:, None])
            tl.store(lse_ptr + o_part, b_m + tl.log2(b_l), mask=m_r)


@triton.jit
def attend_own_page(b_q, p_kv, first, o_pos, seq_end, scale_log2, stride_kc, stride_kn, D: tl.constexpr, PAGE: tl.constexpr):
    """Start the online softmax with the own block, causally masked: (maximum, sum, accumulator).

    Every query sees at least its own position, so the maximum is finite from here on. Slots past the sequence's end may hold
    NaN; they are masked in the scores and zeroed in V, where 0 * NaN would count.
    """
    o_d = tl.arange(0, D)
    o_n = (first // PAGE) * PAGE + tl.arange(0, PAGE)
    b_k = tl.load(p_kv + (o_n % PAGE)[None, :] * stride_kn + o_d[:, None])
    b_v = tl.load(p_kv + stride_kc + (o_n % PAGE)[:, None] * stride_kn + o_d[None, :], mask=(o_n < seq_end)[:, None], other=0.0)
    b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
    b_s = tl.where(o_n[None, :] <= o_pos[:, None], b_s, float("-inf"))
    b_m = tl.max(b_s, 1)
    b_p = tl.exp2(b_s - b_m[:, None])
    return b_m, tl.sum(b_p, 1), tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")


@triton.jit
def attend_page(b_q, b_k, b_v, b_m, b_l, b_acc, member, scale_log2):
    """One step of the online softmax; rows that are not `member` keep their state at no cost per element."""
    b_s = tl.dot(b_q, b_k, input_precision="ieee")
    b_max = tl.where(member, tl.max(b_s, 1) * scale_log2, float("-inf"))
    b_new = tl.maximum(b_m, b_max)
    b_p = tl.exp2(b_s * scale_log2 - tl.where(member, b_new, float("inf"))[:, None])
    b_alpha = tl.exp2(b_m - b_new)
    b_acc = b_acc * b_alpha[:, None]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_new, b_l * b_alpha + tl.sum(b_p, 1), b_acc


@triton.jit
def merge_leftovers(b_m, b_l, b_acc, partial_ptr, lse_ptr, num_ptr, o_row, m_r, o_g, R: tl.constexpr, G: tl.constexpr,
                    D: tl.constexpr):  # fmt: skip
    """Merge the partial results of rows' leftovers; `o_row` is KV head * T + token of every row. Returns (sum, accumulator)."""
    o_d = tl.arange(0, D)
    b_num = tl.load(num_ptr + o_row, mask=m_r, other=0)
    for r in tl.range(0, tl.max(b_num, 0), num_stages=3):
        m_left = r < b_num
        o_part = (o_row * R + r) * G + o_g
        b_lse = tl.load(lse_ptr + o_part, mask=m_left, other=float("-inf"))
        b_o = tl.load(partial_ptr + o_part[:, None] * D + o_d[None, :], mask=m_left[:, None], other=0.0)
        b_new = tl.maximum(b_m, b_lse)
        b_alpha = tl.exp2(b_m - b_new)
        b_weight = tl.exp2(b_lse - b_new)
        b_acc = b_acc * b_alpha[:, None] + b_o.to(tl.float32) * b_weight[:, None]
        b_l = b_l * b_alpha + b_weight
        b_m = b_new
    return b_l, b_acc


@direct_launch
@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    num_leftovers_ptr,
    records_ptr,
    list_pages_ptr,
    list_members_ptr,
    num_tokens,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_kc,
    stride_kn,
    stride_ot,
    stride_oh,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
):
    """Grid (tiles, Hkv). Rows are TILE queries x G query heads."""
    ROWS: tl.constexpr = TILE * G
    i_tile, i_h = tl.program_id(0), tl.program_id(1)
    i_list = (i_tile * tl.num_programs(1) + i_h).to(tl.int64)
    p_record = records_ptr + i_list * 8
    first, begin, end = tl.load(p_record), tl.load(p_record + 1), tl.load(p_record + 2)
    token_shift, own_page, num_listed = tl.load(p_record + 3), tl.load(p_record + 4), tl.load(p_record + 5)
    if end == 0:
        return
    o_r = tl.arange(0, ROWS)
    o_q = o_r // G
    o_g = o_r % G
    o_d = tl.arange(0, D)
    o_n = tl.arange(0, PAGE)
    o_pos = first + o_q
    m_r = (o_pos >= begin) & (o_pos < end)
    o_t = (o_pos + token_shift).to(tl.int64)
    o_h = i_h.to(tl.int64) * G + o_g
    b_q = tl.load(q_ptr + (o_t * stride_qt + o_h * stride_qh)[:, None] + o_d[None, :], mask=m_r[:, None], other=0.0)
    p_kv = kv_ptr + i_h.to(tl.int64) * stride_kh
    b_m, b_l, b_acc = attend_own_page(
        b_q, p_kv + own_page.to(tl.int64) * stride_kp, first, o_pos, end, scale_log2, stride_kc, stride_kn, D, PAGE
    )
    p_k = p_kv + o_n[None, :] * stride_kn + o_d[:, None]
    p_v = p_kv + stride_kc + o_n[:, None] * stride_kn + o_d[None, :]
    for i in range(num_listed):
        page = tl.load(list_pages_ptr + i_list * WIDTH + i).to(tl.int64)
        members = tl.load(list_members_ptr + i_list * WIDTH + i)
        b_k = tl.load(p_k + page * stride_kp)
        b_v = tl.load(p_v + page * stride_kp)
        b_m, b_l, b_acc = attend_page(b_q, b_k, b_v, b_m, b_l, b_acc, ((members >> o_q) & 1) != 0, scale_log2)
    if R > 0:
        o_row = i_h.to(tl.int64) * num_tokens + o_t
        b_l, b_acc = merge_leftovers(b_m, b_l, b_acc, partial_ptr, lse_ptr, num_leftovers_ptr, o_row, m_r, o_g, R, G, D)
    b_o = b_acc / b_l[:, None]
    p_out = out_ptr + (o_t * stride_ot + o_h * stride_oh)[:, None] + o_d[None, :]
    tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_r[:, None])


def fits_hopper_kernels(q: Tensor, kv_lane: Tensor) -> bool:
    """Whether the geometry is the one that the warp-specialised kernels are written for, on a device that runs them."""
    geometry = (q.shape[1] // kv_lane.shape[1], kv_lane.shape[4], kv_lane.shape[3])
    return geometry == (16, 128, 128) and kv_lane.is_contiguous() and uses_hopper_kernels(q)


def _num_persistent_programs(device: torch.device, per_multiprocessor: int) -> int:
    return per_multiprocessor * (num_multiprocessors(device) if device.type == "cuda" else 1)


def _attend_leftovers(q: Tensor, kv_lane: Tensor, plan: SparsePlan, scale: float) -> tuple[Tensor, Tensor]:
    """Partial results of all leftovers, by leftover number: [Hkv * T * R, G, D] in q's dtype and log-sum-exp [.., G] fp32."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, num_heads, _, page_size, _ = kv_lane.shape
    group = num_q_heads // num_heads
    partial = q.new_empty((plan.leftovers.shape[0], group, head_dim))
    lse = q.new_empty((plan.leftovers.shape[0], group), dtype=torch.float32)
    if plan.max_leftovers == 0:
        return partial, lse
    _page_major_kernel[(_num_persistent_programs(q.device, 2),)](
        q,
        kv_lane,
        partial,
        lse,
        plan.leftovers,
        plan.unit_page,
        plan.unit_begin,
        plan.unit_len,
        plan.totals,
        num_tokens,
        num_pages,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        kv_lane.stride(0),
        kv_lane.stride(1),
        kv_lane.stride(2),
        kv_lane.stride(3),
        G=group,
        D=head_dim,
        PAGE=page_size,
        R=plan.max_leftovers,
        QUERIES=max(1, 64 // group),
        num_warps=4,
        num_stages=2,
    )
    return partial, lse


def sparse_prefill(q: Tensor, kv_lane: Tensor, selection: Tensor, batch: AttentionBatch, scale: float, out: Tensor) -> Tensor:
    """Attend to selected blocks in prefills, as `sparse_attention_torch` does.

    Needs the own block of every query in its selection.

    Workspace: up to Hkv * T * (topk - 1) * G partial rows, 4 KiB per leftover in production (2 GB at 8,192 queries).

    Args:
        q: [T, Hq, D].
        kv_lane: [P, Hkv, 2, page, D].
        selection: [Hkv, T, topk] int32.
        batch: prefill sequences.
        scale: factor of the scores.
        out: [T, Hq, D] to write into.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, num_heads, _, page_size, _ = kv_lane.shape
    group = num_q_heads // num_heads
    tile = min(_TILE, page_size)
    min_members = _MIN_MEMBERS if num_tokens >= _MIN_TOKENS_FOR_PAGE_MAJOR else 1
    plan = build_plan(selection, batch, num_pages, tile, min_members)
    if fits_hopper_kernels(q, kv_lane):
        from server.kernels.page_attention_hopper import attend_tiles_hopper
        from server.kernels.page_major_hopper import attend_leftovers_hopper

        partial, lse = attend_leftovers_hopper(q, kv_lane, plan, scale * LOG2_E)
        attend_tiles_hopper(q, kv_lane, plan, partial, lse, scale * LOG2_E, out)
        return out
    partial, lse = _attend_leftovers(q, kv_lane, plan, scale)
    _tile_kernel[(plan.num_tiles, num_heads)](
        q,
        kv_lane,
        out,
        partial,
        lse,
        plan.num_leftovers,
        plan.records,
        plan.list_pages,
        plan.list_members,
        num_tokens,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        kv_lane.stride(0),
        kv_lane.stride(1),
        kv_lane.stride(2),
        kv_lane.stride(3),
        out.stride(0),
        out.stride(1),
        G=group,
        D=head_dim,
        PAGE=page_size,
        TILE=tile,
        WIDTH=plan.list_pages.shape[2],
        R=plan.max_leftovers,
        num_warps=8 if tile * group >= 128 else 4,
        num_stages=3 if head_dim * page_size <= 128 * 128 else 2,
    )
    return out
