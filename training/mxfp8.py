"""Quantises weights to MXFP8, for tests, tiny checkpoints and benchmarks; the server only reads the format."""

import torch
from torch import Tensor

from server.kernels.mxfp8 import GROUP_SIZE, Mxfp8Weight

_MAX_E4M3 = 448.0


def quantize(weight: Tensor) -> Mxfp8Weight:
    """Round [..., N, K] to MXFP8; each group gets the smallest scale under which nothing overflows."""
    groups = weight.float().view(*weight.shape[:-1], -1, GROUP_SIZE)
    mantissas, exponents = torch.frexp(groups.abs().amax(-1) / _MAX_E4M3)
    exponents = exponents - (mantissas == 0.5).int()  # a power of two is its own ceiling
    scales = (exponents + 127).clamp(0, 254).to(torch.uint8)
    factors = scales.view(torch.float8_e8m0fnu).float()
    values = (groups / factors[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    return Mxfp8Weight(values, scales)
