"""What the sampling kernels share: a row's memory, exponents, integer weights, bins and uniform numbers; see `sampling`.

A row's memory is int64: for each of B blocks the key of its best logit, its logits that are not finite and its sum of weights;
then 8 scalars; then counts and masses by bin; then keys and packed values of the gathered tokens.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from server.kernels import sampling
from server.kernels.topk_keys import order_keys

NUM_BINS = tl.constexpr(2048)  # 64 per nat
LAST_BIN = tl.constexpr(64 * sampling.RANGE_NATS - 1)
RANGE = tl.constexpr(float(sampling.RANGE_NATS))
NUM_SCALARS = tl.constexpr(8)
K_BIN, P_FIRST, P_LAST, LAST_GATHERED, NUM_GATHERED, THRESHOLD = (tl.constexpr(i) for i in range(6))
LEAST_KEY = tl.constexpr(-(1 << 63))
GREATEST_KEY = tl.constexpr((1 << 63) - 1)
_UNIT = tl.constexpr(float(sampling.UNIT))
_BIN_SHIFT = tl.constexpr(48)  # a packed value: bin above, weight below
_WEIGHT_MASK = tl.constexpr((1 << 48) - 1)
_INCREMENT = tl.constexpr(sampling.INCREMENT)
_MULTIPLIER_1 = tl.constexpr(sampling.MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(sampling.MULTIPLIER_2)


def row_width(num_blocks: int, capacity: int) -> int:
    """int64 numbers of a row's memory."""
    return 3 * num_blocks + int(NUM_SCALARS.value) + 2 * int(NUM_BINS.value) + 2 * capacity


@triton.jit
def row_memory(space, row, NUM_BLOCKS: tl.constexpr, CAPACITY: tl.constexpr):
    """Pointers to a row's blocks, scalars, counts, masses, keys and values."""
    blocks = space + row * (3 * NUM_BLOCKS + NUM_SCALARS + 2 * NUM_BINS + 2 * CAPACITY)
    scalars = blocks + 3 * NUM_BLOCKS
    counts = scalars + NUM_SCALARS
    masses = counts + NUM_BINS
    keys = masses + NUM_BINS
    return blocks, scalars, counts, masses, keys, keys + CAPACITY


@triton.jit
def block_keys(blocks, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Keys of the blocks' best logits, [BLOCKS] int64."""
    block = tl.arange(0, BLOCKS)
    return tl.load(blocks + block, mask=block < NUM_BLOCKS, other=LEAST_KEY)


@triton.jit
def block_sums(blocks, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Sums of the blocks' weights, [BLOCKS] int64."""
    block = tl.arange(0, BLOCKS)
    return tl.load(blocks + 2 * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=0)


@triton.jit
def row_values(logits, offset, ids, vocab_size):
    """Logits of a row as fp32; -inf for NaN and beyond the row."""
    x = tl.load(logits + offset + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def exponents_of(x, best, temperature):
    """(x - best) / temperature, rounded as IEEE 754 does; NaN where the row has no best logit."""
    return tl.div_rn(x - best, temperature)


@triton.jit
def weights_of(exponents):
    """int64: exp in units, rounded; 0 beyond the range and for NaN."""
    in_range = exponents > -RANGE
    weights = tl.exp(tl.where(in_range, exponents, 0.0).to(tl.float64)) * _UNIT + 0.5
    return tl.where(in_range, weights.to(tl.int64), 0)


@triton.jit
def bin_of(exponents):
    """int32: 1/64 nat each; LAST_BIN + 1 for what has no weight."""
    in_range = exponents > -RANGE
    return tl.where(in_range, (tl.where(in_range, exponents, 0.0) * -64.0).to(tl.int32), LAST_BIN + 1)


@triton.jit
def pack_value(exponents):
    """int64: bin and weight of a token; -1 for what has no weight."""
    value = (bin_of(exponents).to(tl.int64) << _BIN_SHIFT) | weights_of(exponents)
    return tl.where(exponents > -RANGE, value, -1)


@triton.jit
def value_bin(value):
    """Bin of a packed value; -1 for -1."""
    return value >> _BIN_SHIFT


@triton.jit
def value_weight(value):
    """Weight of a packed value that is not -1."""
    return value & _WEIGHT_MASK


@triton.jit
def ceil_product(fraction, mass):
    """ceil(fraction * mass), int64, at least 1."""
    product = fraction.to(tl.float64) * mass.to(tl.float64)
    whole = product.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < product).to(tl.int64), 1)


@triton.jit
def _mix(x):
    x = x + _INCREMENT
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIER_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIER_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform_of(seed, position):
    """Twin: `uniform`; int64 scalars to fp64."""
    return ((_mix(_mix(seed) ^ position) >> 32) & 0xFFFFFFFF).to(tl.float64) * 2.3283064365386963e-10


@triton.jit
def is_ranked(floats, ints, slot):
    """Whether a slot has top_k or top_p."""
    return (tl.load(ints + slot * 4) > 0) | (tl.load(floats + slot * 6 + 1) < 1)


@triton.jit
def is_filtered(floats, ints, slot):
    """Whether a slot has top_k, top_p or min_p."""
    return is_ranked(floats, ints, slot) | (tl.load(floats + slot * 6 + 2) > 0)


@triton.jit
def is_kept(x, ids, weights, threshold, floats, slot):
    """Which tokens pass top_k and top_p, whose last token has the key `threshold`, and min_p."""
    least = tl.load(floats + slot * 6 + 2).to(tl.float64) * _UNIT
    return (order_keys(x, ids) >= threshold) & (weights.to(tl.float64) >= least)
