"""One rank of several that are processes of one host, joined by torch.distributed.

Two groups: Gloo for plans and agreements, and one for the device's tensors, NCCL on GPUs. Nothing listens beyond the loopback
interface, and the ranks find each other through a file. A rank that waits for a plan waits for as long as it takes, asleep.
"""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from server.kernels.all_reduce_norm import Mailboxes
from server.model.mailboxes import can_map_each_other, map_mailboxes
from server.model.shard import ProcessGroup, Shard

logger = logging.getLogger(__name__)

FRAME_BYTES: Final = 16 << 10  # a step of 64 decodes takes a quarter of it
_LENGTH_BYTES: Final = 8
_NEVER: Final = timedelta(days=3650)
# Unless the environment says otherwise: nothing listens beyond the loopback interface, and NCCL does without NVLink's multicast
# (NVLS), which some hosts do not offer to containers, where it hangs at start.
_DEFAULTS: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


class RankGroup:
    """A `server.model.ranks.Ranks`, and a way for rank 0 to send bytes to all others.

    Attributes:
        shard: which rank this is, and of how many.
        collective: sums over the ranks.
    """

    def __init__(self, shard: Shard, device: torch.device, store: Path) -> None:
        """Meet the other ranks.

        Args:
            shard: this rank.
            device: of its model; the current one from now on.
            store: file through which they meet; in a folder that only this user can enter.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        self.shard = shard
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=shard.rank, world_size=shard.world, timeout=_NEVER)
        self._hosts = dist.group.WORLD
        self._devices = dist.new_group(backend="nccl") if device.type == "cuda" else self._hosts
        assert self._devices is not None
        self.collective = ProcessGroup(self._devices, self._mailboxes(device))
        self._bytes = bytearray(FRAME_BYTES)
        self._frame = torch.frombuffer(self._bytes, dtype=torch.uint8)  # the same memory

    def _mailboxes(self, device: torch.device) -> Mailboxes | None:
        """For the sums of a few rows, where all ranks can map each other's memory."""
        world = self.shard.world
        cannot = device.type != "cuda" or not can_map_each_other(world)
        if any(self.any_rank([cannot])):
            return None
        assert self._devices is not None
        mailboxes = None
        try:
            mailboxes = map_mailboxes(self._devices, device)
        except RuntimeError as error:
            logger.warning("the sums of a few tokens go through NCCL, too: %s", error)
        return None if any(self.any_rank([mailboxes is None])) else mailboxes

    def share(self, token_ids: Tensor) -> None:
        """Give every rank the values of rank 0, in place and in the order of the stream."""
        dist.broadcast(token_ids, src=0, group=self._devices)

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags are up on one rank or another."""
        numbers = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._hosts)
        return [number > 0 for number in numbers.tolist()]

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        numbers = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self._hosts)
        return int(numbers.item())

    def send(self, message: bytes) -> None:
        """From rank 0 to all others, who `receive`; in one broadcast up to `FRAME_BYTES`, else in two."""
        head, rest = message[: FRAME_BYTES - _LENGTH_BYTES], message[FRAME_BYTES - _LENGTH_BYTES :]
        self._bytes[:_LENGTH_BYTES] = len(message).to_bytes(_LENGTH_BYTES, "little")
        self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = head
        dist.broadcast(self._frame, src=0, group=self._hosts)
        if rest:
            dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), src=0, group=self._hosts)

    def receive(self) -> bytes:
        """What rank 0 sent; waits for it."""
        dist.broadcast(self._frame, src=0, group=self._hosts)
        num_bytes = int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
        head = bytes(self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes])
        if len(head) == num_bytes:
            return head
        rest = torch.empty(num_bytes - len(head), dtype=torch.uint8)
        dist.broadcast(rest, src=0, group=self._hosts)
        return head + rest.numpy().tobytes()
