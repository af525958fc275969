"""Products with plain and MXFP8 weights: the twin against float64, the kernels on a Hopper GPU against the twin's numbers."""

import pytest
import torch

from server.kernels.linear import linear
from server.kernels.mxfp8 import MAX_SCALE, Mxfp8Weight, dequantize_torch
from tests.kernels.gpu_memory import poison_free_memory
from tests.kernels.test_mxfp8 import all_pairs, exact
from training.mxfp8 import quantize

MAX_ERROR = 3e-3  # of ‖ours - reference‖ / ‖reference‖ for outputs rounded to bf16
FORMATS = ["bf16", "mxfp8"]


def randn(*shape, seed, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def weight_of(form, *shape, device="cuda"):
    weight = randn(*shape, seed=1, device=device, dtype=torch.bfloat16)
    return quantize(weight) if form == "mxfp8" else weight


def reference(x, weight):
    plain = dequantize_torch(weight, torch.float32) if isinstance(weight, Mxfp8Weight) else weight
    return x.double() @ plain.double().T


def error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("form", FORMATS)
def test_the_twin(form):
    x = randn(7, 96, seed=0)
    weight = weight_of(form, 63, 96, device="cpu")
    weight = weight if isinstance(weight, Mxfp8Weight) else weight.float()
    torch.testing.assert_close(linear(x, weight).double(), reference(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 17, 33, 100, 1111])
@pytest.mark.parametrize("shape", [(256, 1024), (200, 1056), (63, 384), (1536, 6144), (8, 32)])
def test_the_kernels(form, num_tokens, shape):
    x = randn(num_tokens, shape[1], seed=2, device="cuda", dtype=torch.bfloat16)
    weight = weight_of(form, *shape)
    poison_free_memory()
    out = linear(x, weight)
    assert (out.shape, out.dtype) == ((num_tokens, shape[0]), torch.bfloat16)
    assert error(out, reference(x, weight)) < MAX_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [12, 29, 64, 128])
@pytest.mark.parametrize("shape", [(6144, 1024), (1280, 6144), (9856, 6144)])
def test_sums_have_one_order_however_programs_share_a_weight(shape, num_tokens):
    x = randn(num_tokens, shape[1], seed=2, device="cuda", dtype=torch.bfloat16)
    weight = weight_of("mxfp8", *shape)
    poison_free_memory()
    out = linear(x, weight)
    assert error(out, reference(x, weight)) < MAX_ERROR
    assert all(torch.equal(linear(x, weight), out) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [16, 64, 256])
def test_the_kernels_use_every_number_exactly(num_tokens):
    """Rows of the unit matrix pick out weights: all values under all scales that are served."""
    pairs = all_pairs()[: MAX_SCALE + 2]
    values = pairs.values.view(torch.uint8)
    values = values.masked_fill((values & 127) == 127, 0).view(torch.float8_e4m3fn)
    weight = Mxfp8Weight(values, pairs.scales.clamp(max=MAX_SCALE))
    unit = torch.eye(256, device="cuda", dtype=torch.bfloat16)
    on_gpu = Mxfp8Weight(weight.values.cuda(), weight.scales.cuda())
    picked = torch.cat([linear(rows, on_gpu) for rows in unit.split(num_tokens)])
    assert torch.equal(picked.cpu(), exact(weight).to(torch.bfloat16).T)


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "num_tokens"), [("bf16", 4), ("bf16", 200), ("mxfp8", 4), ("mxfp8", 40), ("mxfp8", 200)])
def test_rows_may_be_strided_and_none(form, num_tokens):
    weight = weight_of(form, 128, 256)
    wide = randn(num_tokens, 2, 256, seed=3, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(linear(wide[:, 1], weight), linear(wide[:, 1].contiguous(), weight))
    assert linear(wide[:0, 1], weight).shape == (0, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 32, 200])
def test_a_captured_product_follows_its_input(form, num_tokens):
    weight = weight_of(form, 1536, 1024)
    x = randn(num_tokens, 1024, seed=4, device="cuda", dtype=torch.bfloat16)
    linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight)
    x.copy_(randn(num_tokens, 1024, seed=5))
    graph.replay()
    assert torch.equal(out, linear(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [3, 20, 500])
def test_a_nan_reaches_its_output_and_no_other(num_tokens):
    weight = weight_of("mxfp8", 256, 512)
    weight.scales[77, 3] = 255
    x = randn(num_tokens, 512, seed=6, device="cuda", dtype=torch.bfloat16)
    is_nan = linear(x, weight).isnan()
    assert is_nan[:, 77].all()
    assert is_nan.sum() == num_tokens
