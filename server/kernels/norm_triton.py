"""Gemma RMSNorm on the GPU, alone and with the residual addition: one program per row, one read and one write of everything."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.direct_launch import direct_launch
from server.kernels.integers import next_power_of_2
from server.kernels.launch import pdl_options, wait_for_inputs


@direct_launch
@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    stride_x,
    stride_residual,
    eps,
    ADD: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,); `out` and `sum` are contiguous. With ADD the sum is rounded before it is normalised."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < DIM
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * stride_x + dims, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * stride_residual + dims, mask=inside, other=0.0)).to(x.dtype)
        tl.store(sum_ptr + row * DIM + dims, x, mask=inside)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 0) / DIM + eps)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * DIM + dims, (x32 * scale * (1.0 + weight)).to(x.dtype), mask=inside)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, total: Tensor, add: bool) -> None:
    """Rows [N, D] of `x` and `residual` into contiguous `out` and `total`."""
    num_rows, dim = x.shape
    block = next_power_of_2(dim)
    _norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        ADD=add,
        DIM=dim,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
        **pdl_options(x.device),
    )


def gemma_rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension: [..., D] and weight [D] to a contiguous [..., D]; see `gemma_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows = x.reshape(-1, x.shape[-1])
        _launch(rows, rows, weight, eps, out, out, add=False)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add [T, D] to the residual [T, D] and normalise: (normed, new residual), both contiguous; see `add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(x, residual, weight, eps, out, total, add=True)
    return out, total
