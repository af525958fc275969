"""Block scores on Hopper: one copy warp, and two groups of four warps with up to 128 (query, head) rows each.

The groups run independently: while one takes the maximum over a page's 128 columns, the other's matrix product runs.
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
from server.kernels.hopper import copy_tile, row_descriptor
from server.kernels.integers import cdiv
from server.kernels.query_tiles import num_query_tiles, query_tile, tile_records

_STAGES = 4
_GROUP = 16
_MAX_BLOCKS = 256


@gluon.jit
def _copy_pages(k_desc, k_bufs, ready, empty, pages_ptr, block_begin, block_end, STAGES: gl.constexpr, PAGE: gl.constexpr):
    page = gl.load(pages_ptr + block_begin)
    for i_block in range(block_begin, block_end):
        i = i_block - block_begin
        stage = i % STAGES
        row = page * PAGE
        page = gl.load(pages_ptr + gl.minimum(i_block + 1, block_end - 1))
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), k_desc.block_type.nbytes)
        copy_tile(k_desc, [row, 0], ready.index(stage), k_bufs.index(stage))


@gluon.jit
def _score_rows(
    q_ptr, q_bufs, k_bufs, ready, empty, out_ptr, group_ptr, first, begin, end, token_shift, block_begin, block_end, own,
    stride_qt, stride_qh, stride_oh, stride_ot, stride_gh, stride_gt,
    HALF: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, WITH_GROUPS: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_row = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))
    o_pos = first + o_row // HEADS
    m_row = (o_pos >= begin) & (o_pos < end)
    o_q = (o_pos + token_shift).to(gl.int64) * stride_qt + (o_row % HEADS).to(gl.int64) * stride_qh
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, load_layout))
    q_buf = q_bufs.index(HALF)
    q_buf.store(gl.load(q_ptr + o_q[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0))
    fence_async_shared()

    o_r = HALF * ROWS + gl.arange(0, ROWS, layout=row_layout)
    o_p = first + o_r // HEADS
    m_r = (o_p >= begin) & (o_p < end)
    o_t = (o_p + token_shift).to(gl.int64)
    o_h = (o_r % HEADS).to(gl.int64)
    p_out = out_ptr + o_h * stride_oh + o_t * stride_ot
    p_group = group_ptr + o_h * stride_gh + o_t * stride_gt
    o_n = own * PAGE + gl.arange(0, PAGE, layout=gl.SliceLayout(0, mma))
    b_group = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    zero = gl.zeros([ROWS, PAGE], gl.float32, layout=mma)
    for i_block in range(block_begin, block_end):
        i = i_block - block_begin
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        b_s = warpgroup_mma(q_buf, k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(empty.index(stage))
        if i_block == own:
            # Slots after the query do not count, and unwritten ones may hold NaN.
            b_s = gl.where(o_n[None, :] <= o_p[:, None], b_s, float("-inf"))
        b_max = gl.max(b_s, 1)
        gl.store(p_out + i_block, b_max, mask=m_r)
        if WITH_GROUPS:
            b_group = gl.maximum(b_group, b_max)
            if (i_block % GROUP == GROUP - 1) | (i_block == own):
                gl.store(p_group + i_block // GROUP, b_group, mask=m_r)
                b_group = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)


@direct_launch
@gluon.jit(
    do_not_specialize=["max_blocks", "blocks_per_split", "stride_oh", "stride_ot", "stride_gh", "stride_gt", "stride_pb"],
    do_not_specialize_on_alignment=["out_ptr", "group_ptr", "page_table_ptr"],
)
def _score_hopper_kernel(
    q_ptr, k_desc, out_ptr, group_ptr, records_ptr, page_table_ptr, max_blocks, blocks_per_split,
    stride_qt, stride_qh, stride_oh, stride_ot, stride_gh, stride_gt, stride_pb,
    HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, FILL: gl.constexpr, WITH_GROUPS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits of the block axis)."""
    p_record = records_ptr + gl.program_id(0) * 8
    first = gl.load(p_record)
    begin = gl.load(p_record + 1)
    end = gl.load(p_record + 2)
    token_shift = gl.load(p_record + 3)
    i_seq = gl.load(p_record + 7)
    if end == 0:
        return
    own = first // PAGE
    block_begin = gl.program_id(1) * blocks_per_split
    split_end = gl.minimum(block_begin + blocks_per_split, max_blocks)
    if FILL:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        o_r = gl.arange(0, 2 * ROWS, layout=layout)
        o_p = first + o_r // HEADS
        p_fill = out_ptr + (o_r % HEADS).to(gl.int64) * stride_oh + (o_p + token_shift).to(gl.int64) * stride_ot
        nothing = gl.full([2 * ROWS], float("-inf"), gl.float32, layout=layout)
        for i_block in range(gl.maximum(block_begin, own + 1), split_end):
            gl.store(p_fill + i_block, nothing, mask=(o_p >= begin) & (o_p < end))
    if block_begin > own:
        return
    block_end = gl.minimum(split_end, own + 1)
    q_bufs = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, ROWS, D], k_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, PAGE, D], k_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    pages_ptr = page_table_ptr + i_seq.to(gl.int64) * stride_pb
    gl.warp_specialize(
        [
            (
                _score_rows,
                (
                    q_ptr, q_bufs, k_bufs, ready, empty, out_ptr, group_ptr, first, begin, end, token_shift, block_begin,
                    block_end, own, stride_qt, stride_qh, stride_oh, stride_ot, stride_gh, stride_gt,
                    0, HEADS, D, PAGE, ROWS, STAGES, GROUP, WITH_GROUPS,
                ),
            ),
            (
                _score_rows,
                (
                    q_ptr, q_bufs, k_bufs, ready, empty, out_ptr, group_ptr, first, begin, end, token_shift, block_begin,
                    block_end, own, stride_qt, stride_qh, stride_oh, stride_ot, stride_gh, stride_gt,
                    1, HEADS, D, PAGE, ROWS, STAGES, GROUP, WITH_GROUPS,
                ),
            ),
            (_copy_pages, (k_desc, k_bufs, ready, empty, pages_ptr, block_begin, block_end, STAGES, PAGE)),
        ],
        [4, 1],
        [216, 40],
    )  # fmt: skip


def score_blocks_hopper(
    index_q: Tensor, index_lane: Tensor, batch: AttentionBatch, out: Tensor, group_max: Tensor | None, *, fill: bool
) -> None:
    """As `score_blocks`, for a contiguous lane of 128-token pages, dim 128 and 128 or 256 (query, head) rows per tile."""
    num_heads, index_dim = index_q.shape[1], index_q.shape[2]
    page_size = batch.page_size
    tile = query_tile(num_heads, page_size)
    num_tiles = num_query_tiles(batch, tile)
    max_blocks = out.shape[2]
    groups = out if group_max is None else group_max
    processors = num_multiprocessors(index_q.device)
    length = blocks_per_program(num_tiles, max_blocks, index_q.shape[0] / batch.max_seq_len, processors)
    _score_hopper_kernel[(num_tiles, cdiv(max_blocks, length))](
        index_q,
        row_descriptor(index_lane, page_size),
        out,
        groups,
        tile_records(batch, tile),
        batch.page_table,
        max_blocks,
        length,
        index_q.stride(0),
        index_q.stride(1),
        out.stride(0),
        out.stride(1),
        groups.stride(0),
        groups.stride(1),
        batch.page_table.stride(0),
        HEADS=num_heads,
        D=index_dim,
        PAGE=page_size,
        ROWS=tile * num_heads // 2,
        STAGES=_STAGES,
        GROUP=_GROUP,
        FILL=fill,
        WITH_GROUPS=group_max is not None,
        num_warps=4,
    )


def blocks_per_program(num_tiles: int, max_blocks: int, chunk_share: float, processors: int) -> int:
    """Blocks per program, a multiple of the group: one even wave where the tiles alone would leave multiprocessors idle.

    When the chunk is a large share of the context, tiles differ much in length, and shorter programs even them out.
    """
    length = num_tiles * max_blocks // processors
    if chunk_share > 0.5:
        length //= 4
    return min(_MAX_BLOCKS, max(_GROUP, length // _GROUP * _GROUP))
