"""Products with weights that are plain tensors or MXFP8."""

import torch
from torch import Tensor

from server.kernels.mxfp8 import Mxfp8Weight, dequantize_torch


def linear_torch(x: Tensor, weight: Tensor | Mxfp8Weight) -> Tensor:
    """Twin of `linear`."""
    if isinstance(weight, Mxfp8Weight):
        weight = dequantize_torch(weight, x.dtype)
    return torch.nn.functional.linear(x, weight)


def linear(x: Tensor, weight: Tensor | Mxfp8Weight) -> Tensor:
    """Multiply with a transposed weight.

    Args:
        x: [T, K].
        weight: [N, K], in the dtype of `x` or in MXFP8.

    Returns:
        [T, N] in the dtype of `x`; products are summed in fp32.
    """
    return linear_torch(x, weight)
