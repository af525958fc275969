"""Dense causal attention of prefill chunks over a paged sequence: query heads of a KV head stacked as rows, page by page."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.direct_launch import direct_launch
from server.kernels.query_tiles import locate_query_tile, num_query_tiles, padded_num_seqs
from server.kernels.sparse_prefill import LOG2_E, attend_own_page, attend_page, fits_hopper_kernels

_ROWS = 128


@direct_launch
@triton.jit(
    do_not_specialize=["num_seqs", "stride_pb"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "page_table_ptr"],
)
def _dense_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    page_table_ptr,
    num_seqs,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_kc,
    stride_kn,
    stride_ot,
    stride_oh,
    stride_pb,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Grid (Hkv, tiles): the last tiles see the most keys and start first, so that the work's tail is short."""
    ROWS: tl.constexpr = TILE * G
    i_h = tl.program_id(0).to(tl.int64)
    i_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    i_seq, first, begin, end, token_shift = locate_query_tile(query_start_ptr, seq_lens_ptr, num_seqs, i_tile, TILE, BLOCK_B)
    if end == 0:
        return
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, D)
    o_n = tl.arange(0, PAGE)
    o_pos = first + o_r // G
    m_r = (o_pos >= begin) & (o_pos < end)
    o_t = (o_pos + token_shift).to(tl.int64)
    o_h = i_h * G + o_r % G
    b_q = tl.load(q_ptr + (o_t * stride_qt + o_h * stride_qh)[:, None] + o_d[None, :], mask=m_r[:, None], other=0.0)
    p_kv = kv_ptr + i_h * stride_kh
    p_pages = page_table_ptr + i_seq.to(tl.int64) * stride_pb
    own_page = tl.load(p_pages + first // PAGE).to(tl.int64)
    b_m, b_l, b_acc = attend_own_page(
        b_q, p_kv + own_page * stride_kp, first, o_pos, end, scale_log2, stride_kc, stride_kn, D, PAGE
    )
    p_k = p_kv + o_n[None, :] * stride_kn + o_d[:, None]
    p_v = p_kv + stride_kc + o_n[:, None] * stride_kn + o_d[None, :]
    for i in range(first // PAGE):
        page = tl.load(p_pages + i).to(tl.int64)
        b_k = tl.load(p_k + page * stride_kp)
        b_v = tl.load(p_v + page * stride_kp)
        b_m, b_l, b_acc = attend_page(b_q, b_k, b_v, b_m, b_l, b_acc, o_r >= 0, scale_log2)
    b_o = b_acc / b_l[:, None]
    p_out = out_ptr + (o_t * stride_ot + o_h * stride_oh)[:, None] + o_d[None, :]
    tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_r[:, None])


def dense_prefill(q: Tensor, kv_lane: Tensor, batch: AttentionBatch, scale: float, out: Tensor) -> Tensor:
    """Prefill part of `dense_attention`; see there.

    Args:
        q: [T, Hq, D].
        kv_lane: [P, Hkv, 2, page, D].
        batch: prefill sequences.
        scale: factor of the scores.
        out: [T, Hq, D] to write into.
    """
    _, num_q_heads, head_dim = q.shape
    _, num_heads, _, page_size, _ = kv_lane.shape
    group = num_q_heads // num_heads
    tile = max(1, min(_ROWS // group, page_size))
    num_tiles = num_query_tiles(batch, tile)
    if fits_hopper_kernels(q, kv_lane):
        from server.kernels.page_attention_hopper import attend_densely_hopper

        attend_densely_hopper(q, kv_lane, batch, scale * LOG2_E, out)
        return out
    _dense_kernel[(num_heads, num_tiles)](
        q,
        kv_lane,
        out,
        batch.query_start,
        batch.seq_lens,
        batch.page_table,
        batch.seq_lens.shape[0],
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        kv_lane.stride(0),
        kv_lane.stride(1),
        kv_lane.stride(2),
        kv_lane.stride(3),
        out.stride(0),
        out.stride(1),
        batch.page_table.stride(0),
        G=group,
        D=head_dim,
        PAGE=page_size,
        TILE=tile,
        BLOCK_B=padded_num_seqs(batch),
        num_warps=8 if tile * group >= 128 else 4,
        num_stages=3,
    )
    return out
