"""From sums in registers to rows of the output, for `moe_hopper`: through the activation if the product is gated."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _swiglu(gate, up, alpha, beta, limit):
    """SwiGLU-OAI of fp32 numbers in a third of the instructions of exact division; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 gate, up, rest;
        min.NaN.f32 gate, $1, $5;
        neg.f32 rest, $5;
        min.NaN.f32 up, $2, $5;
        max.NaN.f32 up, up, rest;
        add.f32 up, up, $4;
        mul.f32 rest, gate, $3;
        ex2.approx.ftz.f32 rest, rest;
        add.f32 rest, rest, 0f3F800000;
        rcp.approx.ftz.f32 rest, rest;
        mul.f32 gate, gate, rest;
        mul.f32 $0, gate, up;
        }
        """,
        "=f,f,f,f,f,f",
        [gate, up, alpha * -1.4426950408889634, beta, limit],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _store_chunk(
    acc, p_out, row_weight_ptr, out_buf, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    """Columns of the product [64, n] as rows begin .. begin + n of the output.

    They change their layout in `out_buf` at once, or, where that is too small, in steps that the compiler chooses.
    """
    n: gl.constexpr = acc.shape[1]
    if GATED:
        pairs = acc.reshape([4, 2, 8, n]).permute((0, 2, 3, 1))
        gate, up = pairs.split()
        hidden = _swiglu(gate, up, alpha, beta, limit)
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
    b_out = hidden.to(p_out.dtype.element_ty).permute((1, 0))
    if out_buf.shape[0] >= n:
        chunk_buf = out_buf.slice(0, n)
        chunk_buf.store(b_out)
        b_out = chunk_buf.load(out_layout)
    else:
        b_out = gl.convert_layout(b_out, out_layout)
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
    acc, p_out, row_weight_ptr, out_buf, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    """Columns of the product [64, n] as rows begin .. begin + n of the output, in pieces that need little shared memory.

    `p_out` points to the tile's first row and this group's first column, `row_weight_ptr` to the weight of that row; `out_buf`
    is this group's own.
    """
    n: gl.constexpr = acc.shape[1]
    if n == 256:
        left, right = _halves(acc)
        _store_128(left, p_out, row_weight_ptr, out_buf, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
        _store_128(right, p_out, row_weight_ptr, out_buf, num_rows, begin + 128, alpha, beta, limit, N, GATED, MXFP8)
    elif n == 128:
        _store_128(acc, p_out, row_weight_ptr, out_buf, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
    else:
        _store_chunk(acc, p_out, row_weight_ptr, out_buf, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)


@gluon.jit
def _store_128(
    acc, p_out, row_weight_ptr, out_buf, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    left, right = _halves(acc)
    _store_chunk(left, p_out, row_weight_ptr, out_buf, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
    _store_chunk(right, p_out, row_weight_ptr, out_buf, num_rows, begin + 64, alpha, beta, limit, N, GATED, MXFP8)
