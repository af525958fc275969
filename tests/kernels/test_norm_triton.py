import pytest
import torch

from server.kernels.norm_triton import add_rms_norm_triton, gemma_rms_norm_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def reference(x, weight):
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + weight)


@pytest.mark.parametrize("shape", [(1, 64), (3, 63), (2, 5, 100), (7, 1)])
def test_equals_the_float64_reference(shape):
    x, weight = torch.randn(shape, device=DEVICE) * 3, torch.randn(shape[-1], device=DEVICE)
    out = gemma_rms_norm_triton(x, weight, EPS)
    assert out.shape == x.shape
    torch.testing.assert_close(out.double(), reference(x, weight), rtol=1e-5, atol=1e-6)


def test_rows_may_be_strided_and_none():
    wide, weight = torch.randn((4, 2, 64), device=DEVICE), torch.randn(64, device=DEVICE)
    out = gemma_rms_norm_triton(wide[:, 1], weight, EPS)
    torch.testing.assert_close(out.double(), reference(wide[:, 1], weight), rtol=1e-5, atol=1e-6)
    assert gemma_rms_norm_triton(wide[:0], weight, EPS).shape == (0, 2, 64)


def test_half_precision_is_rounded_once():
    x, weight = torch.randn((5, 111), device=DEVICE).half(), torch.randn(111, device=DEVICE).half()
    expected = reference(x, weight)
    out = gemma_rms_norm_triton(x, weight, EPS)
    assert ((out.double() - expected).abs() <= expected.abs() * 1.01 * 2**-11 + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_sum_is_rounded_before_it_is_normalised(dtype):
    x, residual = torch.randn((2, 3, 6, 80), device=DEVICE).to(dtype)[:, 1]
    weight = torch.randn(80, device=DEVICE).to(dtype)
    normed, total = add_rms_norm_triton(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(normed.double(), reference(total, weight), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8191])
def test_true_width_in_bfloat16(num_tokens):
    x, residual = torch.randn((2, num_tokens, 6144), device=DEVICE).bfloat16()
    weight = torch.randn(6144, device=DEVICE).bfloat16()
    normed, total = add_rms_norm_triton(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    expected = reference(total, weight)
    assert float((normed.double() - expected).norm() / expected.norm()) < 2.5e-3
