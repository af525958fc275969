"""The first kernel of `sample_rows`: adjusted logits, the best one of each block, and faults."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from server.kernels.direct_launch import direct_launch
from server.kernels.launch import wait_for_inputs
from server.kernels.sampling_rows_triton import NUM_BINS, NUM_GATHERED, row_memory
from server.kernels.topk_keys import order_keys

# Views of one upload: where they lie in it must not make another program.
_EDITS = ["edit_starts", "edit_ids", "edit_values", "grammar_rows"]


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


@direct_launch
@triton.jit(do_not_specialize_on_alignment=["slots", *_EDITS])
def stats_kernel(
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
