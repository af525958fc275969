"""MXFP8 weights: e4m3 values with one power of two per 32 consecutive inputs, and how both become numbers of a model dtype.

The format is OCP Microscaling (MX) v1.0, MXFP8 with E4M3 elements:
`w[n, k] = e4m3(values[n, k]) * 2^(scales[n, k // 32] - 127)`.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_SIZE = 32  # inputs that share a scale


@dataclass(frozen=True)
class Mxfp8Weight:
    """A weight matrix, or a stack of them, in MXFP8.

    Attributes:
        values: [..., N, K] float8_e4m3fn; a NaN among them makes its whole group NaN by a scale of 255 (see `with_nan_scales`).
        scales: [..., N, K // 32] uint8 e8m0: exponents biased by 127; 255 is NaN.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """[..., N, K], like the shape of the tensor that this stands for."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where both tensors live."""
        return self.values.device

    def __getitem__(self, index: int | slice) -> "Mxfp8Weight":
        """Select along the first dimension: an expert of a stack, or rows of a matrix."""
        return Mxfp8Weight(self.values[index], self.scales[index])


def with_nan_scales(values: Tensor, scales: Tensor) -> Tensor:
    """The scales with 255 where a group of [..., N, K] values holds a NaN, which kernels do not look for."""
    is_nan = (values.view(torch.uint8) & 0x7F) == 0x7F
    return scales.masked_fill(is_nan.view(*scales.shape, GROUP_SIZE).any(-1), 255)


def dequantize_torch(weight: Mxfp8Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a [..., N, K] tensor of `dtype`; exact in fp32, otherwise rounded once."""
    factors = weight.scales.view(torch.float8_e8m0fnu).float()
    return (weight.values.float().view(*factors.shape, GROUP_SIZE) * factors[..., None]).flatten(-2).to(dtype)


@triton.jit
def dequantize(values, scales, DTYPE: tl.constexpr):
    """Tile [R, C] of e4m3 bytes (uint8) and its scales [R, C // 32] (uint8) to [R, C] of DTYPE, rounded once.

    The bits of an e4m3 number, moved to the end of a wider exponent, are the number times 2^-120, subnormals included. Two
    products make that good: with 2^120, which is exact, then with the group's scale, which rounds only what underflows.
    """
    R: tl.constexpr = values.shape[0]
    NUM_GROUPS: tl.constexpr = scales.shape[1]
    GROUP: tl.constexpr = values.shape[1] // NUM_GROUPS
    grouped = tl.reshape(values, [R, NUM_GROUPS, GROUP])
    if tl.bfloat16 == DTYPE:
        exponents = scales.to(tl.uint16)
        bits = tl.where(exponents == 255, 0x7FC0, tl.where(exponents == 0, 0x0040, exponents << 7)).to(tl.uint16)
        factors = tl.broadcast_to(bits.to(tl.bfloat16, bitcast=True)[:, :, None], [R, NUM_GROUPS, GROUP])
        numbers = scale_e4m3(grouped, factors)
    else:
        exponents = scales.to(tl.uint32)
        bits = tl.where(exponents == 255, 0x7FC00000, tl.where(exponents == 0, 0x00400000, exponents << 23)).to(tl.uint32)
        wide = grouped.to(tl.uint32)
        shifted = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True)
        numbers = (shifted * 1.329227995784916e36 * bits.to(tl.float32, bitcast=True)[:, :, None]).to(DTYPE)
    return tl.reshape(numbers, [R, NUM_GROUPS * GROUP])


@triton.jit
def scale_e4m3(values, factors):
    """e4m3 bytes times bf16 factors of the same shape, four at a time in packed arithmetic."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, rest, unit;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 rest, low, 4;
        and.b32 rest, rest, 0x07f007f0;
        lop3.b32 low, low, 0x80008000, rest, 0xea;
        shr.u32 rest, high, 4;
        and.b32 rest, rest, 0x07f007f0;
        lop3.b32 high, high, 0x80008000, rest, 0xea;
        mov.b32 unit, 0x7b807b80;
        mul.rn.bf16x2 low, low, unit;
        mul.rn.bf16x2 high, high, unit;
        mul.rn.bf16x2 $0, low, $3;
        mul.rn.bf16x2 $1, high, $4;
        }
        """,
        "=r,=r,r,r,r",
        [values, factors],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )
