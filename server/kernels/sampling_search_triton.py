"""Exact ends of top_k and top_p inside one bin, for `sampling_ends_triton`: among the gathered tokens, or in the row itself."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from server.kernels.sampling_rows_triton import (
    GREATEST_KEY,
    LEAST_KEY,
    exponents_of,
    pack_value,
    row_values,
    value_bin,
    value_weight,
)
from server.kernels.topk_keys import order_keys


@triton.jit
def _tile(first, num_tokens, is_gathered, keys, values, logits, offset, best, temperature, TILE: tl.constexpr):
    """Ranking keys and packed values of TILE tokens, from the gathered ones or from the row itself."""
    index = first + tl.arange(0, TILE)
    if is_gathered:
        key = tl.load(keys + index, mask=index < num_tokens, other=0)
        value = tl.load(values + index, mask=index < num_tokens, other=-1)
    else:
        x = row_values(logits, offset, index, num_tokens)
        key = order_keys(x, index)
        value = pack_value(exponents_of(x, best, temperature))
    return key, value


@triton.jit
def _last_of_few(bin, base, limit, num_tokens, keys, values, BY_COUNT: tl.constexpr, FEW: tl.constexpr):
    """`last_kept` of at most FEW gathered tokens: each is compared with all others."""
    index, other_index = tl.arange(0, FEW), tl.arange(0, 32)
    key = tl.load(keys + index, mask=index < num_tokens, other=0)
    member = value_bin(tl.load(values + index, mask=index < num_tokens, other=-1)) == bin
    before = tl.zeros_like(key) + base
    for first in range(0, num_tokens, 32):
        inside = first + other_index < num_tokens
        other = tl.load(keys + first + other_index, mask=inside, other=LEAST_KEY)
        value = tl.load(values + first + other_index, mask=inside, other=-1)
        share = tl.full(other.shape, 1, tl.int64) if BY_COUNT else value_weight(value)
        share = tl.where(value_bin(value) == bin, share, 0)
        before += tl.sum(tl.where(other[None, :] > key[:, None], share[None, :], 0), 1)
    return tl.min(tl.where(member & (before < limit), key, GREATEST_KEY), 0)


@triton.jit
def last_kept(
    bin,
    base,
    limit,
    num_tokens,
    is_gathered,
    keys,
    values,
    logits,
    offset,
    best,
    temperature,
    BY_COUNT: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Key of the last token of `bin`, in the order of the ranking, before which fewer than `limit` lie.

    `base` lie in the bins before; a token counts as one, or as its weight. Bisects between keys of tokens.
    """
    low, high = tl.full((), GREATEST_KEY, tl.int64), tl.full((), LEAST_KEY, tl.int64)
    if is_gathered & (num_tokens <= FEW):
        high = _last_of_few(bin, base, limit, num_tokens, keys, values, BY_COUNT, FEW)
        num_tokens = num_tokens * 0
    for first in range(0, num_tokens, TILE):
        key, value = _tile(first, num_tokens, is_gathered, keys, values, logits, offset, best, temperature, TILE)
        member = value_bin(value) == bin
        low = tl.minimum(low, tl.min(tl.where(member, key, GREATEST_KEY), 0))
        high = tl.maximum(high, tl.max(tl.where(member, key, LEAST_KEY), 0))
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        before = base
        below, above = tl.full((), LEAST_KEY, tl.int64), tl.full((), GREATEST_KEY, tl.int64)
        for first in range(0, num_tokens, TILE):
            key, value = _tile(first, num_tokens, is_gathered, keys, values, logits, offset, best, temperature, TILE)
            member = value_bin(value) == bin
            over = member & (key > middle)
            share = over.to(tl.int64) if BY_COUNT else tl.where(over, value_weight(value), 0)
            before += tl.sum(share, 0)
            below = tl.maximum(below, tl.max(tl.where(member & (key <= middle), key, LEAST_KEY), 0))
            above = tl.minimum(above, tl.min(tl.where(over, key, GREATEST_KEY), 0))
        if before < limit:
            high = below
        else:
            low = above
    return high


@triton.jit
def mass_from(
    bin,
    least_key,
    num_tokens,
    is_gathered,
    keys,
    values,
    logits,
    offset,
    best,
    temperature,
    TILE: tl.constexpr,
):
    """Weight of the tokens of `bin` that reach a key."""
    mass = tl.full((), 0, tl.int64)
    for first in range(0, num_tokens, TILE):
        key, value = _tile(first, num_tokens, is_gathered, keys, values, logits, offset, best, temperature, TILE)
        member = (value_bin(value) == bin) & (key >= least_key)
        mass += tl.sum(tl.where(member, value_weight(value), 0), 0)
    return mass
