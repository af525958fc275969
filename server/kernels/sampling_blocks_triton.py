"""The kernels of `sample_rows` with one program per block of a row's logits, behind the first."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from server.kernels.direct_launch import direct_launch
from server.kernels.launch import wait_for_inputs
from server.kernels.sampling_rows_triton import (
    K_BIN,
    LAST_BIN,
    LAST_GATHERED,
    LEAST_KEY,
    NUM_GATHERED,
    P_FIRST,
    P_LAST,
    RANGE,
    THRESHOLD,
    bin_of,
    block_keys,
    exponents_of,
    is_filtered,
    is_kept,
    is_ranked,
    pack_value,
    row_memory,
    row_values,
    weights_of,
)
from server.kernels.topk_keys import key_scores, order_keys


@triton.jit
def _least_exponent(blocks, keys, best, temperature, top_k, top_p, vocab_size, NUM_BLOCKS: tl.constexpr):
    """No token with a lower exponent can be the last that top_k or top_p keeps.

    The k-th best of the blocks' best logits is not above the k-th best of all. And all tokens with less than (1 - top_p) / V of
    the best one's weight have less than 1 - top_p of all weight together; half of that is far from any rounding.
    """
    least = -RANGE
    if top_k > 0:
        if top_k <= NUM_BLOCKS:
            rank = tl.zeros(keys.shape, tl.int32)
            for first in range(0, NUM_BLOCKS, 32):
                other = first + tl.arange(0, 32)
                other_keys = tl.load(blocks + other, mask=other < NUM_BLOCKS, other=LEAST_KEY)
                rank += tl.sum((other_keys[None, :] > keys[:, None]).to(tl.int32), 1)
            least = exponents_of(tl.max(tl.where(rank >= top_k - 1, key_scores(keys), float("-inf")), 0), best, temperature)
    else:
        least = tl.maximum(tl.log(0.5 * (1.0 - top_p) / vocab_size), -RANGE)
    return least


@direct_launch
@triton.jit(do_not_specialize_on_alignment=["slots"])
def weigh_kernel(
    logits,
    stride,
    slots,
    floats,
    ints,
    space,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, blocks); BLOCKS is the power of two that covers the blocks."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    blocks, _scalars, counts, masses, _keys, _values = row_memory(space, row, NUM_BLOCKS, CAPACITY)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    temperature = tl.load(floats + slot * 6)
    if temperature > 0:
        top_k, top_p = tl.load(ints + slot * 4), tl.load(floats + slot * 6 + 1)
        maxima = block_keys(blocks, NUM_BLOCKS, BLOCKS)
        num_better = tl.sum((maxima > tl.load(blocks + block)).to(tl.int32), 0)
        # A block that top_k better ones precede has no token for the histogram, and its sum is not used.
        if (top_k <= 0) | (top_k > NUM_BLOCKS) | (num_better < top_k):
            best = key_scores(tl.max(maxima, 0))
            least = -RANGE
            if is_ranked(floats, ints, slot):
                least = _least_exponent(blocks, maxima, best, temperature, top_k, top_p, vocab_size, NUM_BLOCKS)
            exponents = exponents_of(row_values(logits, row * stride, ids, vocab_size), best, temperature)
            weights = weights_of(exponents)
            tl.store(blocks + 2 * NUM_BLOCKS + block, tl.sum(weights, 0))
            if is_ranked(floats, ints, slot):
                counted = (weights > 0) & (exponents >= least)
                bins = bin_of(exponents)
                tl.atomic_add(masses + bins, weights, mask=counted, sem="relaxed")
                if top_k > 0:
                    tl.atomic_add(counts + bins, tl.full(ids.shape, 1, tl.int64), mask=counted, sem="relaxed")


@direct_launch
@triton.jit(do_not_specialize_on_alignment=["slots"])
def gather_kernel(
    logits,
    stride,
    slots,
    floats,
    ints,
    space,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    blocks, scalars, _counts, _masses, keys, values = row_memory(space, row, NUM_BLOCKS, CAPACITY)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    temperature = tl.load(floats + slot * 6)
    if (temperature > 0) & is_ranked(floats, ints, slot):
        best = key_scores(tl.max(block_keys(blocks, NUM_BLOCKS, BLOCKS), 0))
        own = exponents_of(key_scores(tl.load(blocks + block)), best, temperature)
        if bin_of(own) <= tl.load(scalars + LAST_GATHERED):
            x = row_values(logits, row * stride, ids, vocab_size)
            exponents = exponents_of(x, best, temperature)
            bins = bin_of(exponents)
            wanted = (bins >= tl.load(scalars + P_FIRST)) & (bins <= tl.load(scalars + P_LAST))
            wanted = (wanted | (bins == tl.load(scalars + K_BIN))) & (bins <= LAST_BIN)
            chosen = wanted.to(tl.int32)
            count = tl.sum(chosen, 0)
            if count > 0:
                first = tl.atomic_add(scalars + NUM_GATHERED, count.to(tl.int64), sem="relaxed")
                index = first + tl.cumsum(chosen, 0) - 1
                wanted &= index < CAPACITY
                tl.store(keys + index, order_keys(x, ids), mask=wanted)
                tl.store(values + index, pack_value(exponents), mask=wanted)


@direct_launch
@triton.jit(do_not_specialize_on_alignment=["slots"])
def keep_kernel(
    logits,
    stride,
    slots,
    floats,
    ints,
    space,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    blocks, scalars, _counts, _masses, _keys, _values = row_memory(space, row, NUM_BLOCKS, CAPACITY)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    temperature = tl.load(floats + slot * 6)
    if (temperature > 0) & is_filtered(floats, ints, slot):
        threshold = tl.load(scalars + THRESHOLD)
        total = tl.full((), 0, tl.int64)
        if tl.load(blocks + block) >= threshold:
            best = key_scores(tl.max(block_keys(blocks, NUM_BLOCKS, BLOCKS), 0))
            x = row_values(logits, row * stride, ids, vocab_size)
            weights = weights_of(exponents_of(x, best, temperature))
            total = tl.sum(tl.where(is_kept(x, ids, weights, threshold, floats, slot), weights, 0), 0)
        tl.store(blocks + 2 * NUM_BLOCKS + block, total)
