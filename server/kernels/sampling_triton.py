"""`sample_rows` on the GPU: blocks of every row in parallel, and between them one program per row.

Up to seven kernels, those that some row needs. `stats`: adjusted logits, and the best one of each block. `weigh`: the sum of
weights of each block, and for rows with top_k or top_p a histogram of the tokens that may matter, over 1/64 nat below the best.
`cut`: the few bins in which these can end. `gather`: the tokens of those bins, in any order. `resolve`: the exact ends, by
bisection among them. `keep`: each block's sum again without what the filters took away. `draw`: the token. Weights are
integers, so sums do not depend on the order of work; a token depends on its own row alone, and no grid depends on data.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.launch import pdl_options, wait_for_inputs
from server.kernels.sampling import SamplingTable, SamplingWork
from server.kernels.sampling_adjust import Adjustments
from server.kernels.sampling_ends_triton import cut_kernel, draw_kernel, resolve_kernel
from server.kernels.sampling_rows_triton import (
    K_BIN,
    LAST_BIN,
    LAST_GATHERED,
    LEAST_KEY,
    NUM_BINS,
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
    row_width,
    weights_of,
)
from server.kernels.topk_keys import key_scores, order_keys

BLOCK = 2048
CAPACITY = 8192
# Views of one upload: where they lie in it must not make another program.
_EDITS = ["edit_starts", "edit_ids", "edit_values", "grammar_rows"]


@dataclass(frozen=True)
class SamplingWorkspace:
    """Memory of `sample_rows_triton` for up to R rows; what it holds between calls is nobody's.

    Attributes:
        block: logits of a block, a power of two.
        capacity: tokens that `gather` can keep of a row; with more of them `resolve` reads the row instead.
        space: [R, width] int64, see `sampling_rows_triton`.
    """

    block: int
    capacity: int
    space: Tensor

    @classmethod
    def allocate(
        cls, max_rows: int, vocab_size: int, device: torch.device, *, block: int = BLOCK, capacity: int = CAPACITY
    ) -> "SamplingWorkspace":
        """For rows of `vocab_size` logits: 160 KiB each."""
        width = row_width(-(-vocab_size // block), capacity)
        return cls(block, capacity, torch.empty((max_rows, width), dtype=torch.int64, device=device))


@triton.jit
def _keep_bits(x, ids, inside, mask):
    words = tl.load(mask + ids // 32, mask=inside, other=0)
    return tl.where((words >> (ids % 32)) & 1 != 0, x, float("-inf"))


@triton.jit
def _adjust(
    x,
    ids,
    inside,
    row,
    slots,
    floats,
    ints,
    edit_starts,
    edit_ids,
    edit_values,
    states,
    masks,
    grammar_rows,
    grammar_masks,
    vocab_size,
):
    """Twin: `adjust_rows_torch`."""
    slot = tl.load(slots + row)
    for edit in range(tl.load(edit_starts + row), tl.load(edit_starts + row + 1)):
        x = tl.where(ids == tl.load(edit_ids + edit), x + tl.load(edit_values + edit), x)
    state_row = tl.load(ints + slot * 4 + 2)
    if state_row >= 0:
        state = tl.load(states + state_row * vocab_size + ids, mask=inside, other=0)
        count = state >> 1
        factor = tl.where(state != 0, tl.load(floats + slot * 6 + 3), 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x -= tl.where(count > 0, tl.load(floats + slot * 6 + 4), 0.0)
        x -= count.to(tl.float32) * tl.load(floats + slot * 6 + 5)
    num_words = tl.cdiv(vocab_size, 32)
    mask_row = tl.load(ints + slot * 4 + 3)
    if mask_row >= 0:
        x = _keep_bits(x, ids, inside, masks + mask_row * num_words)
    grammar_row = tl.load(grammar_rows + row)
    if grammar_row >= 0:
        x = _keep_bits(x, ids, inside, grammar_masks + grammar_row * num_words)
    return x


@triton.jit(do_not_specialize_on_alignment=["slots", *_EDITS])
def _stats_kernel(
    logits,
    stride,
    slots,
    floats,
    ints,
    space,
    vocab_size,
    adjusted,
    edit_starts,
    edit_ids,
    edit_values,
    states,
    masks,
    grammar_rows,
    grammar_masks,
    ADJUST: tl.constexpr,
    SHARE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, blocks). Each program clears SHARE bins of its row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    blocks, scalars, counts, masses, _keys, _values = row_memory(space, row, NUM_BLOCKS, CAPACITY)
    wait_for_inputs(PDL)
    raw = tl.load(logits + row * stride + ids, mask=inside, other=0.0).to(tl.float32)
    num_faults = tl.sum((~(tl.abs(raw) < float("inf"))).to(tl.int32), 0)
    x = tl.where(inside & (raw == raw), raw, float("-inf"))
    if ADJUST:
        x = _adjust(
            x,
            ids,
            inside,
            row,
            slots,
            floats,
            ints,
            edit_starts,
            edit_ids,
            edit_values,
            states,
            masks,
            grammar_rows,
            grammar_masks,
            vocab_size,
        )
        tl.store(adjusted + row * vocab_size + ids, x, mask=inside)
    best = tl.max(x, 0)
    first = tl.min(tl.where(x == best, ids, 0x7FFFFFFF), 0)
    tl.store(blocks + block, order_keys(best, first))
    tl.store(blocks + NUM_BLOCKS + block, num_faults.to(tl.int64))
    bins = block * SHARE + tl.arange(0, SHARE)
    tl.store(counts + bins, tl.zeros_like(bins).to(tl.int64), mask=bins < NUM_BINS)
    tl.store(masses + bins, tl.zeros_like(bins).to(tl.int64), mask=bins < NUM_BINS)
    tl.store(scalars + NUM_GATHERED, tl.full((), 0, tl.int64), mask=block == 0)


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


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _weigh_kernel(
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


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _gather_kernel(
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


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _keep_kernel(
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


def sample_rows_triton(
    logits: Tensor,
    table: SamplingTable,
    slots: Tensor,
    positions: Tensor,
    work: SamplingWork,
    out: Tensor,
    workspace: SamplingWorkspace,
    adjustments: Adjustments | None = None,
) -> None:
    """See `sample_rows`; nothing is allocated without `adjustments`, and nothing waits for the device."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_blocks = -(-vocab_size // workspace.block)
    grid = (num_rows, num_blocks)
    shape = {"NUM_BLOCKS": num_blocks, "CAPACITY": workspace.capacity, "BLOCK": workspace.block, "num_warps": 8}
    options = shape | {"BLOCKS": triton.next_power_of_2(num_blocks)} | pdl_options(logits.device)
    adjusted = logits
    edits: tuple[Tensor, ...] = (out,) * 7
    if adjustments is not None:
        adjusted = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
        edits = adjustments.tensors()
    where = (slots, table.floats, table.ints, workspace.space, vocab_size)
    _stats_kernel[grid](
        logits,
        logits.stride(0),
        *where,
        adjusted,
        *edits,
        ADJUST=adjustments is not None,
        SHARE=triton.next_power_of_2(-(-NUM_BINS.value // num_blocks)),
        **shape,
        **pdl_options(logits.device),
    )
    rows = (adjusted, adjusted.stride(0), *where)
    if work >= SamplingWork.PLAIN:
        _weigh_kernel[grid](*rows, **options)
    if work >= SamplingWork.FILTERED:
        cut_kernel[(num_rows,)](*rows, **options)
        _gather_kernel[grid](*rows, **options)
        resolve_kernel[(num_rows,)](*rows, **options)
        _keep_kernel[grid](*rows, **options)
    draw_kernel[(num_rows,)](*rows, positions, out, edits[3], num_rows, COUNT=adjustments is not None, **options)
