"""Products of few tokens with a weight on Hopper, which take as long as the weight takes to read.

Each warp multiplies slices of the inputs of its own for the same rows, straight from the registers that 16-byte loads fill
(`few_operands`). Nothing passes through shared memory but the final sums of the warps.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from server.kernels.direct_launch import direct_launch
from server.kernels.few_operands import add_bf16, add_mxfp8
from server.kernels.integers import cdiv, next_power_of_2
from server.kernels.launch import pdl_options, wait_for_inputs
from server.kernels.linear_narrow import STEP
from server.kernels.mxfp8 import Mxfp8Weight


@gluon.jit
def _load(pointer, offsets, columns, begin, end, EVEN: gl.constexpr):
    """Words of a tile from column `begin` on; nothing behind column `end`, which an even number of rounds never meets."""
    if EVEN:
        return gl.load(pointer + begin + offsets)
    else:
        return gl.load(pointer + begin + offsets, mask=begin + columns < end, other=0)


@direct_launch
@gluon.jit(do_not_specialize=["T"])
def _linear_few_kernel(
    x_ptr, w_ptr, scales_ptr, out_ptr, T, N, stride_x, K: gl.constexpr,
    QUANTISED: gl.constexpr, J: gl.constexpr, U: gl.constexpr, C: gl.constexpr, B: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (rows / 8 J, tokens / 8 U): B warps, each with C chunks of inputs at a time, loaded one round ahead.

    Inputs come as words (int32) of two bf16 or four e4m3 numbers. A chunk is 16 words of a row, 4 for each lane; the first
    dimension of a loaded tile counts (octet of rows, chunk, warp, row in the octet). Rows and tokens that do not exist repeat
    the last one.
    """
    CHUNK: gl.constexpr = 64 if QUANTISED else 32
    LANE: gl.constexpr = CHUNK // 4
    NUM_ROUNDS: gl.constexpr = (K + CHUNK * C * B - 1) // (CHUNK * C * B)
    EVEN: gl.constexpr = K % (CHUNK * C * B) == 0
    W_WORDS: gl.constexpr = K * 16 // CHUNK
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [B, 1, 1], [1, 16, 8])
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [B, 1], [1, 0])
    scale: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 1, 4], [8, 4, 1], [B, 1, 1], [2, 1, 0]))
    i_n = gl.program_id(0) * (8 * J)
    i_t = gl.program_id(1) * (8 * U)
    o_w = gl.arange(0, J * C * B * 8, layout=gl.SliceLayout(1, tile))[:, None]
    o_s = gl.arange(0, J * C * B * 8, layout=gl.SliceLayout(1, scale))[:, None]
    o_x = gl.arange(0, U * C * B * 8, layout=gl.SliceLayout(1, tile))[:, None]
    o_word = gl.arange(0, 16, layout=gl.SliceLayout(0, tile))[None, :]
    o_lane = gl.arange(0, 4, layout=gl.SliceLayout(0, scale))[None, :]

    w_row = gl.minimum(o_w // (C * B * 8) * 8 + o_w % 8, N - 1 - i_n)
    w_columns = o_w // 8 % (C * B) * 16 + o_word
    w_offsets = w_row * W_WORDS + w_columns
    s_row = gl.minimum(o_s // (C * B * 8) * 8 + o_s % 8, N - 1 - i_n)
    s_columns = o_s // 8 % (C * B) * 2 + o_lane // 2
    s_offsets = s_row * (K // 32) + s_columns
    x_row = gl.minimum(o_x // (C * B * 8) * 8 + o_x % 8, T - 1 - i_t)
    x_columns = o_x // 8 % (C * B) * (CHUNK // 2) + o_word // 4 * (LANE // 2) + o_word % 4
    x_offsets = x_row * stride_x + x_columns
    w_ptr += i_n.to(gl.int64) * W_WORDS
    scales_ptr += i_n.to(gl.int64) * (K // 32)
    x_ptr += i_t.to(gl.int64) * stride_x

    weights = _load(w_ptr, w_offsets, w_columns, 0, W_WORDS, EVEN)
    if QUANTISED:
        scales = _load(scales_ptr, s_offsets, s_columns, 0, K // 32, EVEN)
    wait_for_inputs(PDL)
    first = _load(x_ptr, x_offsets, x_columns, 0, K // 2, EVEN)
    if QUANTISED:
        last = _load(x_ptr + 4, x_offsets, x_columns + 4, 0, K // 2, EVEN)
    sums = gl.zeros([B, J * 8, U * 8], gl.float32, layout=mma)
    for i_round in range(NUM_ROUNDS):
        ahead = gl.minimum(i_round + 1, NUM_ROUNDS - 1) * (C * B)
        next_weights = _load(w_ptr, w_offsets, w_columns, ahead * 16, W_WORDS, EVEN)
        next_first = _load(x_ptr, x_offsets, x_columns, ahead * (CHUNK // 2), K // 2, EVEN)
        if QUANTISED:
            next_scales = _load(scales_ptr, s_offsets, s_columns, ahead * 2, K // 32, EVEN)
            next_last = _load(x_ptr + 4, x_offsets, x_columns + 4, ahead * (CHUNK // 2), K // 2, EVEN)
            sums = add_mxfp8(weights, scales, first, last, sums, C, ANY_SCALE=True)
            scales = next_scales
            last = next_last
        else:
            sums = add_bf16(weights, first, sums, C)
        weights = next_weights
        first = next_first
    out = gl.sum(sums, 0)
    out_layout: gl.constexpr = gl.SliceLayout(0, mma)
    o_n = i_n + gl.arange(0, J * 8, layout=gl.SliceLayout(1, out_layout))[:, None]
    o_out = i_t + gl.arange(0, U * 8, layout=gl.SliceLayout(0, out_layout))[None, :]
    gl.store(out_ptr + o_out.to(gl.int64) * N + o_n, out.to(gl.bfloat16), mask=(o_n < N) & (o_out < T))


@dataclass(frozen=True)
class Tile:
    """What a program takes at a time.

    Attributes:
        octets: groups of 8 rows, even.
        chunks: chunks of inputs per warp and round.
        warps: each has slices of the inputs of its own.
    """

    octets: int
    chunks: int
    warps: int


def max_tokens(weight: Tensor | Mxfp8Weight) -> int:
    """Tokens up to which `linear_few` is the fastest, measured on an H200 (docs/quantization.md)."""
    num_rows, num_inputs = weight.shape
    if isinstance(weight, Mxfp8Weight):
        if num_inputs % STEP == 0:
            return 8  # more are for `linear_narrow`
        return 32 if num_inputs <= 2048 else 16
    if num_rows * num_inputs < 20 << 20:
        return 8
    if num_rows > 12288:
        return 0
    return 8 if num_rows > 6336 else 1


def _tile_for(num_rows: int, token_octets: int, is_quantised: bool) -> Tile:
    """The fastest tile measured on an H200: much of a row at once where all programs fit on the device; any tile is right."""
    if token_octets > 1:
        return Tile(2, 2, 4) if token_octets == 2 else Tile(4, 1, 4)
    if num_rows <= (2112 if is_quantised else 3072):
        return Tile(2, 4, 8)
    if num_rows <= 6336:
        return Tile(2, 4, 4)
    return Tile(2, 2, 4) if is_quantised else Tile(2, 2, 8)


def linear_few(x: Tensor, weight: Tensor | Mxfp8Weight, tile: Tile | None = None) -> Tensor:
    """bf16 [T, K] times [N, K] to [T, N]; see `linear`. K is a multiple of 32, rows of `x` begin on 16 bytes."""
    (num_tokens, num_inputs), num_rows = x.shape, weight.shape[0]
    is_quantised = isinstance(weight, Mxfp8Weight)
    token_octets = min(4, next_power_of_2(cdiv(num_tokens, 8)))
    tile = tile or _tile_for(num_rows, token_octets, is_quantised)
    values, scales = (weight.values, weight.scales) if isinstance(weight, Mxfp8Weight) else (weight, weight)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    _linear_few_kernel[(cdiv(num_rows, 8 * tile.octets), cdiv(num_tokens, 8 * token_octets))](
        x.view(torch.int32),
        values.view(torch.int32),
        scales,
        out,
        num_tokens,
        num_rows,
        x.stride(0) // 2,
        K=num_inputs,
        QUANTISED=is_quantised,
        J=tile.octets,
        U=token_octets,
        C=tile.chunks,
        B=tile.warps,
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return out
