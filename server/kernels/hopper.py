"""What the warp-specialised Hopper kernels share: copy descriptors and names that differ between Triton versions.

Knows nothing of scores or attention. Kernels here are written in Gluon, Triton's explicit dialect: a copy warp feeds a ring of
shared-memory stages, and groups of four warps consume it at their own pace, so that one group's arithmetic hides behind
another's matrix products. They need compute capability 9.0 and have portable counterparts in plain Triton.
"""

from functools import cache

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@cache
def _tile_layout(num_rows: int, dim: int) -> gl.NVMMASharedLayout:
    """Layout of a tile of 16-bit values in shared memory; only their width matters."""
    return gl.NVMMASharedLayout.get_default_for([num_rows, dim], gl.bfloat16)


def row_descriptor(lane: Tensor, num_rows: int) -> TensorDescriptor:
    """Copy descriptor of a contiguous lane seen as rows of its last dimension, in boxes of `num_rows` whole rows."""
    dim = lane.shape[-1]
    return TensorDescriptor(lane, [lane.numel() // dim, dim], [dim, 1], [num_rows, dim], _tile_layout(num_rows, dim))
