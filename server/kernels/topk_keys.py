"""Exact selection of the best blocks of a row of scores, inside a kernel.

Every block gets a 64-bit key that orders by (score descending, block ascending), so all keys differ and the result does
not depend on the order of work. A row of n blocks is cut into P interleaved progressions; the K best blocks lie inside the K
progressions with the best maxima, which are cut into P / K each, until a progression is a single block. With P = 16 K = 256
that is one small sort up to n = 256 and two up to n = 4,096.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import triton
import triton.language as tl

MAX_BLOCKS = 1 << 16  # three levels of 256 progressions


@dataclass(frozen=True)
class TopkConfig:
    """How rows are searched: progressions (power of two, at least 4 times the selection) and warps of a program."""

    progressions: int
    num_warps: int


def topk_config(max_blocks: int, width: int) -> TopkConfig:
    """The fastest of those tried for rows of up to `max_blocks` scores and selections of `width` (a power of two)."""
    if max_blocks > MAX_BLOCKS:
        raise ValueError(f"rows of {max_blocks} blocks are longer than the supported {MAX_BLOCKS}")
    if max_blocks <= 4 * width:
        return TopkConfig(4 * width, 1)
    return TopkConfig(16 * width, 4)


@triton.jit
def order_keys(scores, blocks):
    """int64 keys, larger = better; NaN and -0.0 rank as -inf and +0.0."""
    scores = tl.where(scores == scores, scores, float("-inf"))
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - blocks).to(tl.int64)


@triton.jit
def key_blocks(keys):
    """The block of each key of `order_keys`."""
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_scores(keys):
    """The score of each key of `order_keys`, fp32."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_of_progressions(row, bases, num_blocks, STEP: tl.constexpr, LENGTH: tl.constexpr):
    """Largest key of each progression bases, bases + STEP, ... of at most LENGTH blocks below num_blocks: [P] int64."""
    CHUNK: tl.constexpr = LENGTH if LENGTH < 16 else 16
    outside = (tl.full(bases.shape, -0x80000000, tl.int64) << 32) | (0x7FFFFFFF - bases).to(tl.int64)
    best = outside  # below every real key, and no two alike
    for first in tl.static_range(0, LENGTH, CHUNK):
        blocks = bases[:, None] + (first + tl.arange(0, CHUNK))[None, :] * STEP
        inside = blocks < num_blocks
        scores = tl.load(row + blocks, mask=inside, other=0.0)
        keys = tl.where(inside, order_keys(scores, blocks), outside[:, None])
        best = tl.maximum(best, tl.max(keys, 1))
    return best


@triton.jit
def _first_keys(keys, K: tl.constexpr):
    """The K largest of keys [P], descending."""
    return tl.reshape(tl.topk(keys[None, :], K), (K,))


@triton.jit
def _refine(row, best, num_blocks, K: tl.constexpr, FANOUT: tl.constexpr, STEP: tl.constexpr, MAX: tl.constexpr):
    """Cut the K progressions of step STEP that hold the blocks of `best` into FANOUT each; the K best again."""
    if num_blocks > STEP:
        bases = (key_blocks(best) & (STEP - 1))[:, None] + STEP * tl.arange(0, FANOUT)[None, :]
        bases = tl.reshape(bases, (K * FANOUT,))
        best = _first_keys(_best_of_progressions(row, bases, num_blocks, STEP * FANOUT, MAX // (STEP * FANOUT)), K)
    return best


@triton.jit
def best_blocks(row, num_blocks, K: tl.constexpr, P: tl.constexpr, MAX: tl.constexpr):
    """The K best of blocks 0 .. num_blocks - 1, in order: [K] int32; entries beyond num_blocks are meaningless.

    Args:
        row: pointer to the score of block 0, fp32, contiguous.
        num_blocks: int32 scalar, 1 .. MAX.
        K: power of two.
        P: progressions, a power of two >= 4 K.
        MAX: bound of num_blocks, a power of two >= P.
    """
    best = _first_keys(_best_of_progressions(row, tl.arange(0, P), num_blocks, P, MAX // P), K)
    FANOUT: tl.constexpr = P // K
    if MAX > P:
        SECOND: tl.constexpr = FANOUT if MAX > P * FANOUT else MAX // P
        best = _refine(row, best, num_blocks, K, SECOND, P, MAX)
    if MAX > P * FANOUT:
        tl.static_assert(MAX <= P * FANOUT * FANOUT)
        best = _refine(row, best, num_blocks, K, MAX // (P * FANOUT), P * FANOUT, MAX)
    return key_blocks(best)


@triton.jit
def select_blocks(
    row,
    num_blocks,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    P: tl.constexpr,
    MAX: tl.constexpr,
):
    """The selection of one row: [WIDTH] int32, -1 behind the last.

    With at most TOPK blocks all of them, ascending, and no score is read; otherwise the forced blocks ascending (NUM_INIT
    leading, NUM_LOCAL trailing, whose scores are not read), then the best of the rest.

    Args:
        row: pointer to the score of block 0, fp32, contiguous.
        num_blocks: int32 scalar <= MAX.
        TOPK: blocks to select, at least the forced ones.
        WIDTH: power of two >= TOPK.
        NUM_INIT: forced blocks at the start.
        NUM_LOCAL: forced blocks at the end.
        P: as in `best_blocks`, for K = WIDTH.
        MAX: as in `best_blocks`.
    """
    NUM_FORCED: tl.constexpr = NUM_INIT + NUM_LOCAL
    slots = tl.arange(0, WIDTH)
    blocks = tl.where(slots < num_blocks, slots, -1)
    if num_blocks > TOPK:
        best = best_blocks(row + NUM_INIT, num_blocks - NUM_FORCED, WIDTH, P, MAX) + NUM_INIT
        place = (tl.arange(0, WIDTH)[None, :] + NUM_FORCED) == slots[:, None]  # shifts the best behind the forced ones
        blocks = tl.sum(tl.where(place, best[None, :], 0), 1)
        blocks = tl.where(slots < NUM_FORCED, num_blocks - NUM_FORCED + slots, blocks)
        blocks = tl.where(slots < NUM_INIT, slots, blocks)
    return tl.where(slots < TOPK, blocks, -1)
