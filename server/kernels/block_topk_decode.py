"""Block selection of single-token sequences from finished scores: one program per sequence and index head."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.direct_launch import direct_launch
from server.kernels.integers import next_power_of_2
from server.kernels.launch import pdl_options, wait_for_inputs
from server.kernels.topk_keys import TopkConfig, select_blocks, topk_config


@direct_launch
@triton.jit
def _block_topk_decode_kernel(
    scores_ptr,
    seq_lens_ptr,
    out_ptr,
    stride_score_head,
    stride_score_token,
    stride_out_head,
    stride_out_token,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    P: tl.constexpr,
    MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, Hi)."""
    wait_for_inputs(PDL)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    num_blocks = tl.cdiv(tl.load(seq_lens_ptr + b), PAGE)
    row = scores_ptr + head * stride_score_head + b * stride_score_token
    blocks = select_blocks(row, num_blocks, TOPK, WIDTH, NUM_INIT, NUM_LOCAL, P, MAX)
    slots = tl.arange(0, WIDTH)
    tl.store(out_ptr + head * stride_out_head + b * stride_out_token + slots, blocks, mask=slots < TOPK)


def block_topk_decode(
    scores: Tensor,
    batch: AttentionBatch,
    topk: int,
    num_init_blocks: int,
    num_local_blocks: int,
    out: Tensor,
    config: TopkConfig | None = None,
) -> None:
    """Select `topk` blocks for B single-token sequences.

    Args:
        scores: [Hi, B, max_blocks] fp32, last dimension contiguous; forced blocks and those behind the own are not read.
        batch: B sequences of one query token.
        topk: blocks per query, at least the forced ones.
        num_init_blocks: leading blocks that are forced.
        num_local_blocks: blocks that end with the own one and are forced.
        out: [Hi, B, topk] int32: forced blocks ascending, then by (score descending, block ascending); all blocks ascending,
            then -1, where a sequence has at most `topk`.
        config: how to run; chosen by shape when None.
    """
    num_heads, num_tokens, max_blocks = scores.shape
    width = next_power_of_2(topk)
    config = config or topk_config(max_blocks, width)
    _block_topk_decode_kernel[(num_tokens, num_heads)](
        scores,
        batch.seq_lens,
        out,
        scores.stride(0),
        scores.stride(1),
        out.stride(0),
        out.stride(1),
        PAGE=batch.page_size,
        TOPK=topk,
        WIDTH=width,
        NUM_INIT=num_init_blocks,
        NUM_LOCAL=num_local_blocks,
        P=config.progressions,
        MAX=max(config.progressions, next_power_of_2(max_blocks)),
        num_warps=config.num_warps,
        **pdl_options(scores.device),
    )
