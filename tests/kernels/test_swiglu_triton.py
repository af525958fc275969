import pytest
import torch

from server.kernels.swiglu import swiglu_oai_torch
from server.kernels.swiglu_triton import swiglu_oai_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONSTANTS = (1.702, 1.0, 7.0)


@pytest.mark.parametrize("shape", [(1, 64), (3, 63), (2, 1500), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_halves_of_a_product_give_what_the_twin_gives(shape, dtype):
    num_rows, width = shape
    product = (torch.randn((num_rows, 2 * width), device=DEVICE) * 6).to(dtype)
    gate, up = product.chunk(2, dim=-1)
    out = swiglu_oai_triton(gate, up, *CONSTANTS)
    assert out.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out, swiglu_oai_torch(gate, up, *CONSTANTS), rtol=tolerance, atol=tolerance)


def test_a_fault_stays_visible_in_its_own_element():
    gate, up = torch.ones((2, 2, 8), device=DEVICE)
    gate[0, 3] = up[1, 5] = float("nan")
    out = swiglu_oai_triton(gate, up, *CONSTANTS)
    assert out.isnan().nonzero().tolist() == [[0, 3], [1, 5]]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8191])
def test_true_width_in_bfloat16(num_tokens):
    gate, up = (torch.randn((num_tokens, 24576), device=DEVICE) * 3).bfloat16().chunk(2, dim=-1)
    out = swiglu_oai_triton(gate, up, *CONSTANTS)
    torch.testing.assert_close(out, swiglu_oai_torch(gate, up, *CONSTANTS), rtol=2**-7, atol=1e-3)
