"""MXFP8 weights on their way from shared memory to the matrix unit of Hopper, for `moe_hopper`.

A thread reads 32 bytes of a row at once, which is one group of one scale. The product wants other columns in one thread, so the
inner dimension is permuted within 128 columns, and activations are stored in that order, as `moe_plan` gathers them; a sum does
not mind.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Where each bit of a register's, a lane's and a warp's number points, as (row, column): a lane has 32 columns of two rows.
_FRAGMENT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
# The same, with columns as (group that shares a scale, column in the group).
_GROUPED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 32],
    )
)
# One factor per row and group, where its numbers are.
FACTORS = gl.constexpr(gl.SliceLayout(2, _GROUPED.value))


@gluon.jit
def _scale_e4m3(values, factors):
    """E4m3 bytes times bf16 factors, four at a time; bytes 0, 2, 1, 3 of a word in this order.

    The bits of an e4m3 number in the place of a bf16 number's are the number times 2^-120, subnormals included.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, rest;
        shl.b32 rest, $2, 4;
        shl.b32 low, $2, 8;
        and.b32 rest, rest, 0x07f007f0;
        lop3.b32 low, low, 0x80008000, rest, 0xea;
        shr.u32 rest, $2, 4;
        and.b32 rest, rest, 0x07f007f0;
        lop3.b32 high, $2, 0x80008000, rest, 0xea;
        mul.rn.bf16x2 $0, low, $3;
        mul.rn.bf16x2 $1, high, $4;
        }
        """,
        "=r,=r,r,r,r",
        [values, factors],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def fragments(w_buf, words, MMA: gl.constexpr):
    """A tile of bytes [64, 128] and a word of four scales per row to two operands [64, 64] bf16 of permuted columns."""
    operand: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    o_c = gl.arange(0, 4, layout=gl.SliceLayout(0, FACTORS))
    exponents = ((words[:, None] >> (o_c * 8)[None, :]) & 255).to(gl.uint16)
    # 2^(exponent - 127 + 120); infinite above MAX_SCALE of `mxfp8`, which loading refuses.
    bits = gl.where(exponents == 255, 0x7FC0, gl.where(exponents > 134, 0x7F80, (exponents + 120) << 7)).to(gl.uint16)
    factors = bits.to(gl.bfloat16, bitcast=True).expand_dims(2).broadcast_to([64, 4, 32])
    values = gl.convert_layout(w_buf.load(_FRAGMENT).reshape([64, 4, 32]), _GROUPED)
    # Bits of a number's place, high to low: c1 c0 h s1 s0 j0 j1; as columns of the product: h s1 s0 j0 c1 c0 j1.
    split = _scale_e4m3(values, factors).reshape([64, 4, 2, 4, 2, 2]).permute((0, 3, 4, 1, 5, 2))
    first, second = split.reshape([64, 64, 2]).split()
    return gl.convert_layout(first, operand), gl.convert_layout(second, operand)
