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
NAN_SCALE = 255
MAX_SCALE = 134
"""The largest scale that all kernels take, 2^7: with it e4m3 reaches 57,344. `moe_hopper_mxfp8` makes more infinite."""


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
    """The scales with NAN_SCALE where a group of [..., N, K] values holds a NaN, which kernels do not look for."""
    is_nan = (values.view(torch.uint8) & 0x7F) == 0x7F
    return scales.masked_fill(is_nan.view(*scales.shape, GROUP_SIZE).any(-1), NAN_SCALE)


def largest_scale(scales: Tensor) -> int:
    """The largest of some scales (uint8) that is not NaN; 0 without any."""
    largest = int(scales.max()) if scales.numel() else 0
    return largest if largest < NAN_SCALE else int(scales.where(scales < NAN_SCALE, 0).max())


def dequantize_torch(weight: Mxfp8Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a [..., N, K] tensor of `dtype`; exact in fp32, otherwise rounded once."""
    factors = weight.scales.view(torch.float8_e8m0fnu).float()
    return (weight.values.float().view(*factors.shape, GROUP_SIZE) * factors[..., None]).flatten(-2).to(dtype)


@triton.jit
def dequantize(values, scales, DTYPE: tl.constexpr):
    """Tile [R, C] of e4m3 bytes (uint8) and its scales [R, C // 32] (uint8) to [R, C] of DTYPE; see `scale_e4m3`."""
    R: tl.constexpr = values.shape[0]
    NUM_GROUPS: tl.constexpr = scales.shape[1]
    GROUP: tl.constexpr = values.shape[1] // NUM_GROUPS
    numbers = scale_e4m3(tl.reshape(values, [R, NUM_GROUPS, GROUP]), scales[:, :, None], DTYPE)
    return tl.reshape(numbers, [R, NUM_GROUPS * GROUP])


@triton.jit
def scale_e4m3(values, scales, DTYPE: tl.constexpr):
    """e4m3 bytes (uint8) times their scales (uint8, of a shape that broadcasts) in DTYPE, rounded once.

    The bits of an e4m3 number, moved to the end of a wider exponent, are the number times 2^-120, subnormals included. Two
    products make that good: with 2^120, which is exact, then with the scale, which rounds only what underflows. In bf16 the
    move is that of the sign-extended byte by four bits, with what lies between sign and exponent masked out.
    """
    if tl.bfloat16 == DTYPE:
        return _scale_bytes(values, tl.broadcast_to(_bf16_factors(scales).to(tl.bfloat16, bitcast=True), values.shape))
    else:
        exponents = scales.to(tl.uint32)
        bits = tl.where(exponents == 255, 0x7FC00000, tl.where(exponents == 0, 0x00400000, exponents << 23)).to(tl.uint32)
        wide = values.to(tl.uint32)
        shifted = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True)
        return (shifted * 1.329227995784916e36 * bits.to(tl.float32, bitcast=True)).to(DTYPE)


@triton.jit
def _bf16_factors(scales):
    """Bits of 2^(scale - 127) in bf16: a subnormal for 0, NaN for 255."""
    exponents = scales.to(tl.uint16)
    return tl.where(exponents == 255, 0x7FC0, tl.where(exponents == 0, 0x0040, exponents << 7)).to(tl.uint16)


@triton.jit
def _packed_factors(scales, shape: tl.constexpr):
    factors = _bf16_factors(scales).to(tl.uint32)
    return tl.broadcast_to(factors | (factors << 16), shape)


@triton.jit
def scale_e4m3_words(words, scales):
    """As `scale_e4m3` in bf16 for four consecutive bytes at a time (int32): the results of the first to the fourth byte.

    Bytes that were loaded as words stay packed in registers; single ones are unpacked and packed again.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, unit;
        prmt.b32 low, $4, 0, 0x9180;
        prmt.b32 high, $4, 0, 0xb3a2;
        shl.b32 low, low, 4;
        shl.b32 high, high, 4;
        and.b32 low, low, 0x87f087f0;
        and.b32 high, high, 0x87f087f0;
        mov.b32 unit, 0x7b807b80;
        mul.rn.bf16x2 low, low, unit;
        mul.rn.bf16x2 high, high, unit;
        mul.rn.bf16x2 low, low, $5;
        mul.rn.bf16x2 high, high, $5;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
        }
        """,
        "=h,=h,=h,=h,r,r",
        [words, _packed_factors(scales, words.shape)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def scale_e4m3_words_once(words, scales):
    """As `scale_e4m3_words` with one product instead of two, for scales up to MAX_SCALE; larger ones give other numbers."""
    factors = tl.where(scales == 255, 0x7FC07FC0, scales.to(tl.int32) * 0x00800080 + 0x3C003C00)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high;
        prmt.b32 low, $4, 0, 0x9180;
        prmt.b32 high, $4, 0, 0xb3a2;
        shl.b32 low, low, 4;
        shl.b32 high, high, 4;
        and.b32 low, low, 0x87f087f0;
        and.b32 high, high, 0x87f087f0;
        mul.rn.bf16x2 low, low, $5;
        mul.rn.bf16x2 high, high, $5;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
        }
        """,
        "=h,=h,=h,=h,r,r",
        [words, tl.broadcast_to(factors, words.shape)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def scale_e4m3_pairs(pairs, scales):
    """As `scale_e4m3_words` for two consecutive bytes at a time (int16)."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 both, unit;
        cvt.u32.u16 both, $2;
        prmt.b32 both, both, 0, 0x9180;
        shl.b32 both, both, 4;
        and.b32 both, both, 0x87f087f0;
        mov.b32 unit, 0x7b807b80;
        mul.rn.bf16x2 both, both, unit;
        mul.rn.bf16x2 both, both, $3;
        mov.b32 {$0, $1}, both;
        }
        """,
        "=h,=h,h,r",
        [pairs, _packed_factors(scales, pairs.shape)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scale_bytes(values, factors):
    """The bf16 case of `scale_e4m3`, four numbers at a time in packed arithmetic."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, unit;
        prmt.b32 low, $2, 0, 0x9180;
        prmt.b32 high, $2, 0, 0xb3a2;
        shl.b32 low, low, 4;
        shl.b32 high, high, 4;
        and.b32 low, low, 0x87f087f0;
        and.b32 high, high, 0x87f087f0;
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
