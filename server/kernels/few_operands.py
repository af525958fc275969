"""Products of few tokens straight from registers: what `linear_few` and `moe_few_mxfp8` share.

Weights are the long side of `mma.m16n8k16`, tokens the short one. The order of the inputs inside a product is free, so each
lane's consecutive inputs are declared to be those that the matrix unit expects of the lane: nothing passes through shared
memory (a layout change that would move data does not compile). Each warp has chunks of inputs of its own for the same rows; the
sums of the warps are added at the end. Inputs come as words (int32) of two bf16 or four e4m3 numbers, which keeps packed in
registers what a loop carries.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from server.kernels.mxfp8 import scale_e4m3_words, scale_e4m3_words_once

copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def bf16_pairs(words):
    """int32 [...] to bf16 [..., 2]."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    return gl.join(first, second)


@gluon.jit
def add_bf16(weights, rows, sums, C: gl.constexpr):
    """Add the products of C chunks of 32 inputs per warp to `sums` [B, 8 J, 8 U]; see `add_mxfp8`. A lane has four words."""
    B: gl.constexpr = sums.shape[0]
    J: gl.constexpr = sums.shape[1] // 8
    U: gl.constexpr = sums.shape[2] // 8
    a = gl.permute(gl.reshape(bf16_pairs(weights), [J, C, B, 8, 4, 4, 2]), [2, 0, 3, 1, 5, 4, 6])
    b = gl.permute(gl.reshape(bf16_pairs(rows), [U, C, B, 8, 4, 4, 2]), [2, 1, 5, 4, 6, 0, 3])
    return _add(gl.reshape(a, [B, J * 8, C * 32]), gl.reshape(b, [B, C * 32, U * 8]), sums)


@gluon.jit
def add_mxfp8(weights, scales, first, last, sums, C: gl.constexpr, ANY_SCALE: gl.constexpr = False):
    """Add the products of C chunks of 64 inputs per warp to `sums` [B, 8 J, 8 U].

    `weights` are words of (octet of rows, chunk, warp, row, four lanes' four words), `scales` bytes of (octet, chunk, warp,
    row, lane); `first` and `last` words of (octet of tokens, chunk, warp, token, four lanes' four words): a lane has eight
    words of a row, and these are the first and the last four. Without ANY_SCALE scales must not exceed MAX_SCALE.
    """
    B: gl.constexpr = sums.shape[0]
    J: gl.constexpr = sums.shape[1] // 8
    U: gl.constexpr = sums.shape[2] // 8
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 4, 1], [B, 1, 1], [2, 1, 0])
    words = gl.convert_layout(gl.reshape(weights, [J * C * B * 8, 4, 4]), lanes, assert_trivial=True)
    scales = gl.convert_layout(gl.reshape(scales, [J * C * B * 8, 4]), gl.SliceLayout(2, lanes), assert_trivial=True)
    if ANY_SCALE:
        n0, n1, n2, n3 = scale_e4m3_words(words, gl.expand_dims(scales, 2))
    else:
        n0, n1, n2, n3 = scale_e4m3_words_once(words, gl.expand_dims(scales, 2))
    a = gl.reshape(gl.join(gl.join(n0, n2), gl.join(n1, n3)), [J, C, B, 8, 4, 8, 2])
    b = gl.reshape(bf16_pairs(gl.join(first, last)), [U, C, B, 8, 4, 4, 2, 2])
    a = gl.reshape(gl.permute(a, [2, 0, 3, 1, 5, 4, 6]), [B, J * 8, C * 64])
    b = gl.reshape(gl.permute(b, [2, 1, 6, 5, 4, 7, 0, 3]), [B, C * 64, U * 8])
    return _add(a, b, sums)


@gluon.jit
def _add(a, b, sums):
    mma: gl.constexpr = sums.type.layout
    a = gl.convert_layout(a, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    b = gl.convert_layout(b, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)
    return mma_v2(a, b, sums)


@gluon.constexpr_function
def word_layout(num_warps):
    """Of words as `add_mxfp8` takes them, [octets, chunks of all warps, 8 rows, 16 words]."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [1, num_warps, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def scale_layout(num_warps):
    """Of scales, [octets, chunks of all warps, 8 rows, 4 lanes]."""
    return gl.SliceLayout(4, gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 8, 4, 1], [1, num_warps, 1, 1, 1], [4, 3, 2, 1, 0]))


@gluon.constexpr_function
def _axis_layout(layout, axis):
    for other in (3, 2, 1, 0):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def places(SIZE: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0 .. SIZE - 1 along one axis of a four-dimensional tensor, the others of size 1."""
    along = gl.arange(0, SIZE, layout=_axis_layout(layout, axis))
    for other in gl.static_range(4):
        if other != axis:
            along = gl.expand_dims(along, other)
    return along
