"""SwiGLU-OAI, the activation of every MLP: `g' * sigmoid(alpha * g') * (u' + beta)`.

`g' = min(g, limit)` has no lower clamp; `u' = clip(u, -limit, limit)`.
"""

import torch
from torch import Tensor


def swiglu_oai_torch(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    """Twin of `swiglu_oai`."""
    gate32 = gate.float().clamp(max=limit)
    up32 = up.float().clamp(-limit, limit)
    return (gate32 * torch.sigmoid(alpha * gate32) * (up32 + beta)).to(gate.dtype)


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    """Apply the activation elementwise.

    Args:
        gate: [T, I]; rows may be strided.
        up: [T, I], likewise and in the same dtype.
        alpha: config key `swiglu_alpha`, gain inside the sigmoid.
        beta: config key `swiglu_beta`, added to the up half.
        limit: config key `swiglu_limit`, the clamp.

    Returns:
        [T, I], contiguous, in the dtype of `gate`; fp32 inside, one rounding.
    """
    if gate.is_cuda:
        from server.kernels.swiglu_triton import swiglu_oai_triton

        return swiglu_oai_triton(gate, up, alpha, beta, limit)
    return swiglu_oai_torch(gate, up, alpha, beta, limit)
