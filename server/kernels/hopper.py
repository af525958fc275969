"""What the warp-specialised Hopper kernels share: copy descriptors and names that differ between Triton versions.

Knows nothing of what is computed. Kernels here are written in Gluon, Triton's explicit dialect: a copy warp feeds a ring of
shared-memory stages, and groups of four warps consume it at their own pace, so that one group's arithmetic hides behind
another's matrix products. They need compute capability 9.0 and have portable counterparts in plain Triton.
"""

from collections.abc import Sequence
from functools import cache

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@cache
def _box_layout(box: tuple[int, ...], num_bytes: int) -> gl.NVMMASharedLayout:
    """Layout of a box of elements of one or two bytes in shared memory; nothing but their width matters."""
    return gl.NVMMASharedLayout.get_default_for(list(box), {1: gl.uint8, 2: gl.bfloat16}[num_bytes])


def box_descriptor(
    tensor: Tensor, box: tuple[int, ...], shape: Sequence[int] | None = None, strides: Sequence[int] | None = None
) -> TensorDescriptor:
    """Copy descriptor of a tensor of one- or two-byte elements in boxes.

    Args:
        tensor: gives the memory, and its own shape and strides unless others are given.
        box: elements of a copy in each dimension.
        shape: of the memory as copies see it; what lies outside reads as zero.
        strides: in elements; the last one is 1.
    """
    layout = _box_layout(box, tensor.element_size())
    return TensorDescriptor(tensor, list(shape or tensor.shape), list(strides or tensor.stride()), list(box), layout)


def row_descriptor(lane: Tensor, num_rows: int) -> TensorDescriptor:
    """Copy descriptor of a contiguous lane seen as rows of its last dimension, in boxes of `num_rows` whole rows."""
    dim = lane.shape[-1]
    return box_descriptor(lane, (num_rows, dim), (lane.numel() // dim, dim), (dim, 1))
