"""MXFP8 numbers: all pairs of value and scale against float64."""

import pytest
import torch
import triton
import triton.language as tl

from server.kernels.mxfp8 import (
    GROUP_SIZE,
    MAX_SCALE,
    NAN_SCALE,
    Mxfp8Weight,
    dequantize,
    dequantize_torch,
    scale_e4m3_words_once,
    with_nan_scales,
)
from training.mxfp8 import quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _dequantize_kernel(values_ptr, scales_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns, groups = tl.arange(0, COLUMNS), tl.arange(0, COLUMNS // 32)
    values = tl.load(values_ptr + rows[:, None] * COLUMNS + columns)
    scales = tl.load(scales_ptr + rows[:, None] * (COLUMNS // 32) + groups)
    tl.store(out_ptr + rows[:, None] * COLUMNS + columns, dequantize(values, scales, DTYPE))


@triton.jit
def _words_kernel(words_ptr, scales_ptr, out_ptr, WORDS: tl.constexpr):
    row, words = tl.program_id(0), tl.arange(0, WORDS)
    scales = tl.load(scales_ptr + row * (WORDS // 8) + words // 8)
    first, second, third, fourth = scale_e4m3_words_once(tl.load(words_ptr + row * WORDS + words), scales)
    p_out = out_ptr + row * (4 * WORDS) + 4 * words
    tl.store(p_out, first)
    tl.store(p_out + 1, second)
    tl.store(p_out + 2, third)
    tl.store(p_out + 3, fourth)


def all_pairs():
    """[256, 256]: row s has all values under scale s."""
    values = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 256 // GROUP_SIZE)
    return Mxfp8Weight(values, scales)


def exact(weight):
    """The definition in float64: sign, exponent biased by 7, three bits of mantissa, and no infinity."""
    byte = weight.values.view(torch.uint8).long()
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).double()
    magnitude = torch.where(exponent == 0, mantissa * 2**-9, (1 + mantissa / 8) * torch.exp2((exponent - 7).double()))
    magnitude[(byte & 127) == 127] = torch.nan
    scales = torch.exp2(weight.scales.double() - 127).masked_fill(weight.scales == 255, torch.nan)
    return magnitude * torch.where(byte > 127, -1.0, 1.0).double() * scales.repeat_interleave(GROUP_SIZE, -1)


def bits(tensor):
    """Bit patterns, with one pattern for all NaNs."""
    return tensor.masked_fill(tensor.isnan(), torch.nan).view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_twin_gives_all_pairs_exactly(dtype):
    weight = all_pairs()
    assert torch.equal(bits(dequantize_torch(weight, dtype)), bits(exact(weight).to(dtype)))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's numpy says so where a number becomes infinite
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_the_kernel_gives_all_pairs_exactly(dtype):
    weight = all_pairs()
    marked = Mxfp8Weight(weight.values, with_nan_scales(weight.values, weight.scales))
    out = torch.full((256, 256), torch.nan, dtype=dtype, device=DEVICE)
    triton_dtype = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    _dequantize_kernel[(16,)](
        marked.values.view(torch.uint8).to(DEVICE), marked.scales.to(DEVICE), out, ROWS=16, COLUMNS=256, DTYPE=triton_dtype
    )
    assert torch.equal(bits(out.cpu()), bits(exact(marked).to(dtype)))


@pytest.mark.gpu
def test_words_with_one_product_give_all_pairs_up_to_the_largest_scale_exactly():
    weight = all_pairs()[[*range(MAX_SCALE + 1), NAN_SCALE]]
    marked = Mxfp8Weight(weight.values, with_nan_scales(weight.values, weight.scales))
    out = torch.full(marked.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    _words_kernel[(len(out),)](marked.values.view(torch.int32).cuda(), marked.scales.cuda(), out, WORDS=64)
    assert torch.equal(bits(out.cpu()), bits(exact(marked).to(torch.bfloat16)))


def test_a_nan_makes_its_group_nan_and_no_other():
    weight = all_pairs()[100:101]
    marked = Mxfp8Weight(weight.values, with_nan_scales(weight.values, weight.scales))
    is_nan = dequantize_torch(marked, torch.float32).isnan()[0].view(-1, GROUP_SIZE)
    assert is_nan.all(1).tolist() == is_nan.any(1).tolist() == [False, False, False, True] * 2


def test_quantising_what_was_quantised_changes_nothing_and_errs_by_half_a_step():
    weight = torch.randn((3, 63, 160), generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 63)[:, None]
    weight[0, 0, :GROUP_SIZE] = 0
    quantised = quantize(weight)
    restored = dequantize_torch(quantised, torch.float32)
    assert torch.equal(dequantize_torch(quantize(restored), torch.float32), restored)
    step = torch.maximum(
        weight.abs(), weight.unflatten(-1, (-1, GROUP_SIZE)).abs().amax(-1).repeat_interleave(GROUP_SIZE, -1) / 2**14
    )
    assert ((restored - weight).abs() <= step * 2**-4).all()
