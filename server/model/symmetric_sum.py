"""Sums of a decode step's activations over GPUs that reach each other's memory: one kernel instead of NCCL's protocol.

Each rank copies its tensor into memory that all ranks have mapped, waits for the others, and adds up all of them in the order
of the ranks, so the sums are the same to the bit everywhere. With many tokens NCCL moves less.
"""

import os
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

MAX_BYTES: Final = 1 << 20  # 85 tokens of the released width in bf16
WORLDS: Final = (2, 4, 8)  # for others PyTorch's kernel adds up in another order on each rank
_DTYPES: Final = (torch.bfloat16, torch.float32)
_ALIGNMENT: Final = 16


class SymmetricSum:
    """A buffer in memory that all ranks of a group have mapped, for one sum at a time in the order of one stream."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Map the ranks' buffers; all ranks call it.

        Raises:
            RuntimeError: the GPUs cannot map each other's memory.
        """
        from torch.distributed import _symmetric_memory

        # As with NCCL: no NVLink multicast, which some hosts do not offer to containers.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._buffer = _symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self._buffer, group)
        self._group_name = group.group_name

    def takes(self, x: Tensor) -> bool:
        """Whether `x` is small enough and laid out as the kernel wants it; the same on all ranks for the same shape."""
        num_bytes = x.numel() * x.element_size()
        return x.dtype in _DTYPES and x.is_contiguous() and 0 < num_bytes <= MAX_BYTES and num_bytes % _ALIGNMENT == 0

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks in a tensor of its own; `x` is one that it `takes`."""
        shared = self._buffer.view(x.dtype)[: x.numel()].view(x.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", self._group_name)
        return total


def can_map_each_other(world: int, has_access: Callable[[int, int], bool] = torch.cuda.can_device_access_peer) -> bool:
    """Whether GPUs 0 .. world - 1 of this host can be joined by a `SymmetricSum`."""
    pairs = [(i, j) for i in range(world) for j in range(world) if i != j]
    return world in WORLDS and all(has_access(i, j) for i, j in pairs)
