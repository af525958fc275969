"""From sums in registers to rows of the output, for `moe_hopper`: through the activation if the product is gated."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _store_chunk(
    acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    """Columns of the product [64, n] as rows begin .. begin + n of the output."""
    n: gl.constexpr = acc.shape[1]
    if GATED:
        pairs = acc.reshape([4, 2, 8, n]).permute((0, 2, 3, 1))
        gate, up = pairs.split()
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        hidden = gate / (1.0 + gl.exp(-alpha * gate)) * (up + beta)
        if MXFP8:
            # Bits of a row, high to low: c1 c0 s0 j1 j0; columns of the output go in the order s0 j0 c1 c0 j1.
            hidden = hidden.reshape([4, 2, 2, 2, n]).permute((1, 3, 0, 2, 4))
        hidden = hidden.reshape([32, n])
        layout: gl.constexpr = hidden.type.layout
        o_n = begin + gl.arange(0, n, layout=gl.SliceLayout(0, layout))
        weight = gl.load(row_weight_ptr + o_n, mask=o_n < num_rows, other=0.0)
        hidden = hidden * weight[None, :]
    else:
        hidden = acc
    WIDTH: gl.constexpr = 32 if GATED else 64
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    b_out = gl.convert_layout(hidden.to(p_out.dtype.element_ty).permute((1, 0)), out_layout)
    o_r = begin + gl.arange(0, n, layout=gl.SliceLayout(1, out_layout))
    o_c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, out_layout))
    gl.store(p_out + o_r.to(gl.int64)[:, None] * N + o_c[None, :], b_out, mask=(o_r < num_rows)[:, None])


@gluon.jit
def _halves(acc):
    """Left and right half of the columns."""
    n: gl.constexpr = acc.shape[1]
    return acc.reshape([acc.shape[0], 2, n // 2]).permute((0, 2, 1)).split()


@gluon.jit
def store_columns(
    acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    """Columns of the product [64, n] as rows begin .. begin + n of the output, in pieces that need little shared memory.

    `p_out` points to the tile's first row and this group's first column, `row_weight_ptr` to the weight of that row.
    """
    n: gl.constexpr = acc.shape[1]
    if n == 256:
        left, right = _halves(acc)
        _store_128(left, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
        _store_128(right, p_out, row_weight_ptr, num_rows, begin + 128, alpha, beta, limit, N, GATED, MXFP8)
    elif n == 128:
        _store_128(acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
    else:
        _store_chunk(acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)


@gluon.jit
def _store_128(
    acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    left, right = _halves(acc)
    _store_chunk(left, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
    _store_chunk(right, p_out, row_weight_ptr, num_rows, begin + 64, alpha, beta, limit, N, GATED, MXFP8)
