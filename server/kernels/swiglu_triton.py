"""SwiGLU-OAI on the GPU as one launch, for products whose epilogue does not have it."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.direct_launch import direct_launch
from server.kernels.integers import cdiv, next_power_of_2
from server.kernels.launch import pdl_options, wait_for_inputs
from server.kernels.moe_tiles import swiglu

_BLOCK = 1024


@direct_launch
@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, out_ptr, stride_gate, stride_up, alpha, beta, limit,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of the width); `out` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    wait_for_inputs(PDL)
    gate = tl.load(gate_ptr + row * stride_gate + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + columns, mask=inside, other=0.0).to(tl.float32)
    result = swiglu(gate, up, alpha, beta, limit)
    tl.store(out_ptr + row * WIDTH + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu_oai_triton(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    """Gate and up [T, I], whose rows may be strided, to a contiguous [T, I]; see `swiglu_oai`."""
    num_rows, width = gate.shape
    out = torch.empty((num_rows, width), dtype=gate.dtype, device=gate.device)
    if out.numel():
        _swiglu_kernel[(num_rows, cdiv(width, _BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), alpha, beta, limit,
            WIDTH=width, BLOCK=min(_BLOCK, next_power_of_2(width)), num_warps=4, **pdl_options(gate.device),
        )  # fmt: skip
    return out
