"""What the warp-specialised Hopper kernels share: copy descriptors and names that differ between Triton versions.

Knows nothing of what is computed. Kernels here are written in Gluon, Triton's explicit dialect: a copy warp feeds a ring of
shared-memory stages, and groups of four warps consume it at their own pace, so that one group's arithmetic hides behind
another's matrix products. They need compute capability 9.0 and have portable counterparts in plain Triton.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class CopyKind:
    """What kernels are compiled for of a copy descriptor; there is one object for each combination of its attributes.

    Attributes:
        dtype: of the elements, one or two bytes wide.
        box: elements of a copy in each dimension.
        layout: of a box in shared memory.
    """

    def __init__(self, dtype: torch.dtype, box: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.box = list(box)
        # Nothing but the width of elements matters.
        self.layout = gl.NVMMASharedLayout.get_default_for(self.box, {1: gl.uint8, 2: gl.bfloat16}[dtype.itemsize])


_copy_kind = cache(CopyKind)


class CopyDescriptor(TensorDescriptor):  # type: ignore[misc]
    """Triton's descriptor without its checks: the driver makes them again when it encodes one, which is at each launch."""

    def __init__(self, tensor: Tensor, shape: Sequence[int], strides: Sequence[int], kind: CopyKind) -> None:
        self.base = tensor
        self.shape = shape
        self.strides = strides
        self.block_shape = kind.box
        self.layout = kind.layout
        self.padding = "zero"
        self.round_f32_to_tf32 = False
        self.kind = kind


def box_descriptor(
    tensor: Tensor, box: tuple[int, ...], shape: Sequence[int] | None = None, strides: Sequence[int] | None = None
) -> CopyDescriptor:
    """Copy descriptor of a tensor of one- or two-byte elements in boxes.

    Args:
        tensor: gives the memory, and its own shape and strides unless others are given.
        box: elements of a copy in each dimension.
        shape: of the memory as copies see it; what lies outside reads as zero.
        strides: in elements; the last one is 1.
    """
    return CopyDescriptor(tensor, shape or tensor.shape, strides or tensor.stride(), _copy_kind(tensor.dtype, box))


def row_descriptor(lane: Tensor, num_rows: int) -> CopyDescriptor:
    """Copy descriptor of a contiguous lane seen as rows of its last dimension, in boxes of `num_rows` whole rows."""
    dim = lane.shape[-1]
    return box_descriptor(lane, (num_rows, dim), (lane.numel() // dim, dim), (dim, 1))
