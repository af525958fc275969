"""Block scores of single-token sequences: keys on the M side of the product, all index heads in one pass over the keys.

Programs cut each sequence's pages evenly, so the grid depends on host bounds only and the work on each sequence's length.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.direct_launch import direct_launch
from server.kernels.integers import next_power_of_2
from server.kernels.launch import hint_read, pdl_options, wait_for_inputs

MAX_PROGRAMS = 1 << 14
MIN_DOT = 16  # smallest side of a tensor-core product; fewer index heads are padded with zeros


@dataclass(frozen=True)
class ScoreConfig:
    """How a launch cuts each sequence's pages over programs, and how these run."""

    num_splits: int
    num_stages: int
    num_warps: int
    hint: bool = False


def score_config(num_sequences: int, max_blocks: int) -> ScoreConfig:
    """A page per program while all are resident at once; then two programs per multiprocessor, until they get too long.

    The bound may be far above the sequences' lengths, as a captured graph keeps it. A program without pages takes about 3 ns,
    so there are at most MAX_PROGRAMS, if that leaves every sequence one.
    """
    num_pages = num_sequences * max_blocks
    if num_pages <= 256:
        return ScoreConfig(num_splits=max_blocks, num_stages=1, num_warps=4, hint=True)
    pages_each = min(16 if num_pages <= 32768 else 8, -(-num_pages // 264))
    num_splits = min(-(-max_blocks // pages_each), max(1, MAX_PROGRAMS // num_sequences))
    return ScoreConfig(num_splits=num_splits, num_stages=5, num_warps=4)


@triton.jit
def load_queries(q_ptr, stride_q_head, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_PAD: tl.constexpr):
    """One token's index queries as [DIM, HEADS_PAD], zero beyond NUM_HEADS."""
    dims, heads = tl.arange(0, DIM), tl.arange(0, HEADS_PAD)
    return tl.load(q_ptr + heads[None, :] * stride_q_head + dims[:, None], mask=heads[None, :] < NUM_HEADS, other=0.0)


@triton.jit
def page_maxima(queries, lane_ptr, page, stride_page, stride_key, block, num_keys, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Largest dot product of each query with the keys of a page before position `num_keys` (None: all): [HEADS_PAD] fp32."""
    rows, dims = tl.arange(0, PAGE), tl.arange(0, DIM)
    keys = tl.load(lane_ptr + page.to(tl.int64) * stride_page + rows[:, None] * stride_key + dims[None, :])
    scores = tl.dot(keys, queries, input_precision="ieee")  # [PAGE, HEADS_PAD]
    if num_keys is not None:
        scores = tl.where(block * PAGE + rows[:, None] < num_keys, scores, float("-inf"))
    return tl.max(scores, 0)


@direct_launch
@triton.jit(do_not_specialize=["max_blocks", "num_pages", "num_splits", "stride_table", "stride_out_head", "stride_out_token"])
def _index_score_decode_kernel(
    q_ptr,
    lane_ptr,
    page_table_ptr,
    seq_lens_ptr,
    out_ptr,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_key,
    stride_table,
    stride_out_head,
    stride_out_token,
    max_blocks,
    num_pages,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SELECT_OVER: tl.constexpr,
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    HINT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * num_splits,).

    SELECT_OVER = 0 writes every column of `out`. SELECT_OVER > 0 writes only what a selection of that many blocks reads: no
    sequence with so few blocks, and of the others neither the NUM_INIT first nor the NUM_LOCAL last blocks, so that all pages
    are full and need no mask. ONE_PAGE says that num_splits covers max_blocks.
    """
    b, split = (tl.program_id(0) // num_splits).to(tl.int64), tl.program_id(0) % num_splits
    page_table_ptr += b * stride_table
    q_ptr += b * stride_q_token
    if HINT and PDL:
        maybe = tl.load(page_table_ptr + NUM_INIT + split, cache_modifier=".cg")
        maybe = tl.minimum(tl.maximum(maybe, 0), num_pages - 1).to(tl.int64)
        KEY_BYTES: tl.constexpr = DIM * lane_ptr.dtype.element_ty.primitive_bitwidth // 8
        hint_read(lane_ptr + maybe * stride_page + tl.arange(0, PAGE) * stride_key, KEY_BYTES)
    wait_for_inputs(PDL)
    num_keys = tl.load(seq_lens_ptr + b)
    num_blocks = tl.cdiv(num_keys, PAGE)
    queries = load_queries(q_ptr, stride_q_head, NUM_HEADS, DIM, HEADS_PAD)
    heads = tl.arange(0, HEADS_PAD)
    head_mask = heads < NUM_HEADS
    out_rows = out_ptr + b * stride_out_token + heads.to(tl.int64) * stride_out_head  # [HEADS_PAD]
    end = num_blocks
    if SELECT_OVER > 0:
        end = tl.where(num_blocks > SELECT_OVER, num_blocks - NUM_LOCAL, 0)
        num_keys = None
    if ONE_PAGE:
        block = NUM_INIT + split
        page = tl.load(page_table_ptr + block)  # before the length is known, which shortens the chain of loads
        if block < end:
            best = page_maxima(queries, lane_ptr, page, stride_page, stride_key, block, num_keys, PAGE, DIM)
            tl.store(out_rows + block, best, mask=head_mask)
    else:
        per_split = tl.cdiv(end - NUM_INIT, num_splits)
        first = NUM_INIT + split * per_split
        for block in tl.range(first, min(first + per_split, end), num_stages=NUM_STAGES):
            page = tl.load(page_table_ptr + block)
            best = page_maxima(queries, lane_ptr, page, stride_page, stride_key, block, num_keys, PAGE, DIM)
            tl.store(out_rows + block, best, mask=head_mask)
    if SELECT_OVER == 0:
        for block in range(num_blocks + split, max_blocks, num_splits):
            tl.store(out_rows + block, tl.full((HEADS_PAD,), float("-inf"), tl.float32), mask=head_mask)


def launch_scores(
    index_q: Tensor,
    index_lane: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    *,
    select_over: int = 0,
    num_init_blocks: int = 0,
    num_local_blocks: int = 0,
    config: ScoreConfig | None = None,
) -> None:
    """Launch the kernel on `out` [Hi, B, max_blocks]; see there for `select_over`, which zero turns off."""
    num_tokens, num_heads, dim = index_q.shape
    max_blocks = out.shape[-1]
    config = config or score_config(num_tokens, max_blocks)
    _index_score_decode_kernel[(num_tokens * config.num_splits,)](
        index_q,
        index_lane,
        batch.page_table,
        batch.seq_lens,
        out,
        index_q.stride(0),
        index_q.stride(1),
        index_lane.stride(0),
        index_lane.stride(1),
        batch.page_table.stride(0),
        out.stride(0),
        out.stride(1),
        max_blocks,
        index_lane.shape[0],
        config.num_splits,
        NUM_HEADS=num_heads,
        HEADS_PAD=max(MIN_DOT, next_power_of_2(num_heads)),
        DIM=dim,
        PAGE=batch.page_size,
        SELECT_OVER=select_over,
        NUM_INIT=num_init_blocks,
        NUM_LOCAL=num_local_blocks,
        ONE_PAGE=config.num_splits >= max_blocks,
        HINT=config.hint,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **pdl_options(index_q.device),
    )


def index_score_decode(
    index_q: Tensor, index_lane: Tensor, batch: AttentionBatch, out: Tensor, config: ScoreConfig | None = None
) -> None:
    """Score every visible block of B single-token sequences.

    Args:
        index_q: [B, Hi, Di].
        index_lane: [P, page, Di].
        batch: B sequences of one query token.
        out: [Hi, B, max_blocks] fp32, last dimension contiguous; written everywhere, -inf behind the own block.
        config: how to run; chosen by shape when None.
    """
    launch_scores(index_q, index_lane, batch, out, config=config)
