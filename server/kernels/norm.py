"""Gemma RMSNorm of the residual stream, alone and fused with the residual addition.

`y = round(x * rsqrt(mean(x^2) + eps) * (1 + w))`, everything in fp32, one rounding to the model dtype at the end. The weight
is stored without the one.
"""

import torch
from torch import Tensor


def gemma_rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin of `gemma_rms_norm`."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * (1.0 + weight.float())).to(x.dtype)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Twin of `add_rms_norm`."""
    new_residual = x + residual
    return gemma_rms_norm_torch(new_residual, weight, eps), new_residual


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension.

    Args:
        x: [..., D], any floating dtype.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] in the dtype of `x`.
    """
    if x.is_cuda:
        from server.kernels.norm_triton import gemma_rms_norm_triton

        return gemma_rms_norm_triton(x, weight, eps)
    return gemma_rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum.

    Args:
        x: [T, D], output of attention or MLP.
        residual: [T, D], same dtype.
        weight: [D].
        eps: added to the mean square.

    Returns:
        (normed, new_residual), both [T, D] in the model dtype; the sum is rounded before it is normalised.
    """
    if x.is_cuda:
        from server.kernels.norm_triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_torch(x, residual, weight, eps)
