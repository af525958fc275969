"""Memory of GPUs of one host that all ranks of a group have mapped, for `server.kernels.all_reduce_norm`."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from server.kernels.all_reduce_norm import EMPTY, MAX_ROWS, Mailboxes, num_words


def map_mailboxes(group: dist.ProcessGroup, device: torch.device) -> Mailboxes:
    """Make this rank's mailbox and map the others'; all ranks call it, and none uses it before all have returned.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory.
    """
    from torch.distributed import _symmetric_memory

    # As with NCCL: no NVLink multicast, which some hosts do not offer to containers.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    own = _symmetric_memory.empty(num_words(world), dtype=torch.int32, device=device)
    mapping = _symmetric_memory.rendezvous(own, group)
    own.fill_(EMPTY)
    torch.cuda.synchronize(device)
    addresses = [mapping.get_buffer(peer, own.shape, own.dtype).data_ptr() for peer in range(world)]
    return Mailboxes(
        rank=rank,
        addresses=torch.tensor(addresses, device=device),
        own=own,
        rounds=torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
    )


def can_map_each_other(world: int, has_access: Callable[[int, int], bool] = torch.cuda.can_device_access_peer) -> bool:
    """Whether each of GPUs 0 .. world - 1 of this host reaches the memory of all others."""
    return all(has_access(i, j) for i in range(world) for j in range(world) if i != j)
