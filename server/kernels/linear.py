"""Products with weights that are plain tensors or MXFP8.

On a Hopper GPU few tokens take a kernel that is as fast as it reads the weight; more take cuBLAS for bf16 weights and, by their
number, one of two kernels of ours for MXFP8 ones.
"""

import torch
from torch import Tensor

from server.kernels.device import is_hopper
from server.kernels.mxfp8 import GROUP_SIZE, Mxfp8Weight, dequantize_torch


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
        [T, N] in the dtype of `x`; products are summed in fp32. A capture as a CUDA graph is valid for any content.
    """
    if not _has_kernels(x) or x.shape[1] % GROUP_SIZE:
        return linear_torch(x, weight)
    from server.kernels.linear_few import linear_few, max_tokens
    from server.kernels.linear_hopper import linear_hopper
    from server.kernels.linear_narrow import MAX_TOKENS, STEP, linear_narrow

    if x.shape[0] <= max_tokens(weight):
        return linear_few(x, weight)
    if isinstance(weight, Mxfp8Weight) and x.shape[0] <= MAX_TOKENS and x.shape[1] % STEP == 0:
        return linear_narrow(x, weight)
    if isinstance(weight, Mxfp8Weight) and weight.shape[0] % 8 == 0:
        return linear_hopper(x, weight)
    return linear_torch(x, weight)


def _has_kernels(x: Tensor) -> bool:
    """On a Hopper GPU, in bf16, not empty, with rows that begin on 16 bytes."""
    if x.dtype != torch.bfloat16 or not x.numel() or not is_hopper(x.device):
        return False
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
