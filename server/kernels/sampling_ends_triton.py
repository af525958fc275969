"""The kernels of `sample_rows` with one program per row: where top_k and top_p can end, where they end, and the draw."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from server.kernels import sampling
from server.kernels.direct_launch import direct_launch
from server.kernels.launch import wait_for_inputs
from server.kernels.sampling_rows_triton import (
    K_BIN,
    LAST_GATHERED,
    LEAST_KEY,
    NUM_BINS,
    NUM_GATHERED,
    P_FIRST,
    P_LAST,
    THRESHOLD,
    block_keys,
    block_sums,
    ceil_product,
    exponents_of,
    is_filtered,
    is_kept,
    is_ranked,
    row_memory,
    row_values,
    uniform_of,
    weights_of,
)
from server.kernels.sampling_search_triton import last_kept, mass_from
from server.kernels.topk_keys import key_blocks, key_scores

_FEW = tl.constexpr(256)
_NOT_FINITE = tl.constexpr(sampling.RowStatus.NOT_FINITE.value)
_NO_CHOICE = tl.constexpr(sampling.RowStatus.NO_CHOICE.value)


@direct_launch
@triton.jit(do_not_specialize_on_alignment=["slots"])
def cut_kernel(
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
    """Grid (rows,). Makes counts and masses cumulative, and finds the bins that must be known token by token.

    These are the one in which top_k ends, and where top_p can: the mass that top_k leaves is known up to one bin here.
    """
    row = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, NUM_BINS)
    blocks, scalars, counts, masses, _keys, _values = row_memory(space, row, NUM_BLOCKS, CAPACITY)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    if (tl.load(floats + slot * 6) > 0) & is_ranked(floats, ints, slot):
        mass = tl.cumsum(tl.load(masses + bins), 0)
        tl.store(masses + bins, mass)
        top_k, top_p = tl.load(ints + slot * 4), tl.load(floats + slot * 6 + 1)
        k_bin = tl.full((), -1, tl.int64)
        if top_k > 0:
            low = tl.max(mass, 0)
            high = low
            count = tl.cumsum(tl.load(counts + bins), 0)
            tl.store(counts + bins, count)
            if tl.max(count, 0) >= top_k:
                k_bin = tl.sum((count < top_k).to(tl.int64), 0)
                low = tl.sum(tl.where(bins == k_bin - 1, mass, 0), 0)
                high = tl.sum(tl.where(bins == k_bin, mass, 0), 0)
        else:
            low = tl.sum(block_sums(blocks, NUM_BLOCKS, BLOCKS), 0)
            high = low
        first, last = tl.full((), -1, tl.int64), tl.full((), -1, tl.int64)
        if top_p < 1:
            first = tl.sum((mass < ceil_product(top_p, low)).to(tl.int64), 0)
            last = tl.sum((mass < ceil_product(top_p, high)).to(tl.int64), 0)
        tl.store(scalars + K_BIN, k_bin)
        tl.store(scalars + P_FIRST, first)
        tl.store(scalars + P_LAST, last)
        tl.store(scalars + LAST_GATHERED, tl.maximum(k_bin, last))


@triton.jit
def _before(cumulative, bin):
    """Sum of the bins before `bin`."""
    return tl.load(cumulative + bin - 1, mask=bin > 0, other=0)


@direct_launch
@triton.jit(do_not_specialize_on_alignment=["slots"])
def resolve_kernel(
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
    """Grid (rows,). Finds the key of the last token that top_k and top_p keep."""
    row = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, NUM_BINS)
    blocks, scalars, counts, masses, keys, values = row_memory(space, row, NUM_BLOCKS, CAPACITY)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    temperature = tl.load(floats + slot * 6)
    last = tl.full((), LEAST_KEY, tl.int64)
    if (temperature > 0) & is_ranked(floats, ints, slot):
        best = key_scores(tl.max(block_keys(blocks, NUM_BLOCKS, BLOCKS), 0))
        count = tl.load(scalars + NUM_GATHERED)
        is_gathered = count <= CAPACITY
        num_tokens = tl.where(is_gathered, count, vocab_size).to(tl.int32)
        offset = row * stride
        mass = tl.load(masses + bins)
        top_k, top_p = tl.load(ints + slot * 4), tl.load(floats + slot * 6 + 1)
        kept = tl.where(top_k > 0, tl.max(mass, 0), tl.sum(block_sums(blocks, NUM_BLOCKS, BLOCKS), 0))
        bin = tl.load(scalars + K_BIN)
        if bin >= 0:
            last = last_kept(
                bin,
                _before(counts, bin),
                top_k,
                num_tokens,
                is_gathered,
                keys,
                values,
                logits,
                offset,
                best,
                temperature,
                True,
                _FEW,
                BLOCK,
            )
            kept = _before(masses, bin)
            if top_p < 1:
                kept += mass_from(bin, last, num_tokens, is_gathered, keys, values, logits, offset, best, temperature, BLOCK)
        if top_p < 1:
            limit = ceil_product(top_p, kept)
            bin = tl.sum((mass < limit).to(tl.int64), 0)
            last = last_kept(
                bin,
                _before(masses, bin),
                limit,
                num_tokens,
                is_gathered,
                keys,
                values,
                logits,
                offset,
                best,
                temperature,
                False,
                _FEW,
                BLOCK,
            )
    tl.store(scalars + THRESHOLD, last)


@direct_launch
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "positions", "out"])
def draw_kernel(
    logits,
    stride,
    slots,
    floats,
    ints,
    space,
    vocab_size,
    positions,
    out,
    states,
    num_rows,
    COUNT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,). Writes token and status, and with COUNT the token's state for penalties."""
    row = tl.program_id(0).to(tl.int64)
    block_ids = tl.arange(0, BLOCKS)
    blocks, scalars, _counts, _masses, _keys, _values = row_memory(space, row, NUM_BLOCKS, CAPACITY)
    wait_for_inputs(PDL)
    slot = tl.load(slots + row)
    best_key = tl.max(block_keys(blocks, NUM_BLOCKS, BLOCKS), 0)
    best, token = key_scores(best_key), key_blocks(best_key)
    num_faults = tl.sum(tl.load(blocks + NUM_BLOCKS + block_ids, mask=block_ids < NUM_BLOCKS, other=0), 0)
    temperature = tl.load(floats + slot * 6)
    if (temperature > 0) & (num_faults == 0) & (best > float("-inf")):
        sums = block_sums(blocks, NUM_BLOCKS, BLOCKS)
        number = uniform_of(tl.load(ints + slot * 4 + 1), tl.load(positions + row))
        target = (number * tl.sum(sums, 0).to(tl.float64)).to(tl.int64)
        block = tl.minimum(tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0), NUM_BLOCKS - 1)
        base = tl.sum(tl.where(block_ids < block, sums, 0), 0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = row_values(logits, row * stride, ids, vocab_size)
        weights = weights_of(exponents_of(x, best, temperature))
        if is_filtered(floats, ints, slot):
            weights = tl.where(is_kept(x, ids, weights, tl.load(scalars + THRESHOLD), floats, slot), weights, 0)
        token = block * BLOCK + tl.sum((base + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    status = tl.where(num_faults > 0, _NOT_FINITE, tl.where(best > float("-inf"), 0, _NO_CHOICE))
    tl.store(out + row, token.to(tl.int64))
    tl.store(out + num_rows + row, status.to(tl.int64))
    if COUNT:
        state_row = tl.load(ints + slot * 4 + 2)
        if state_row >= 0:
            place = states + state_row * vocab_size + token
            tl.store(place, tl.load(place) + 2)
