"""Which part of the model one tensor-parallel rank holds, and what joins the parts.

Query heads, the widths of MLPs and experts, and the rows of the logits' matrix are cut evenly. KV heads and their index heads
are cut while there are enough of them and held by several ranks beyond that. Everything else is on every rank.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.distributed
from torch import Tensor

from server.kernels.all_reduce_norm import Mailboxes, all_reduce_add_norm
from server.kernels.norm import add_rms_norm


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `world`."""

    rank: int = 0
    world: int = 1

    def even(self, total: int, what: str) -> slice:
        """This rank's share of `total` things that no two ranks share.

        Raises:
            ValueError: they cannot be cut evenly; names `what`.
        """
        if total % self.world:
            raise ValueError(f"{what}: {total} cannot be cut for {self.world} ranks")
        size = total // self.world
        return slice(self.rank * size, (self.rank + 1) * size)

    def vocab(self, total: int) -> slice:
        """This rank's share of the rows that logits are made with; all of them when they cannot be cut evenly."""
        return slice(0, total) if total % self.world else self.even(total, "vocab_size")

    def kv_heads(self, total: int) -> slice:
        """This rank's KV heads (and index query heads): those that its query heads read.

        Raises:
            ValueError: neither does the number of ranks divide the number of heads nor the other way round.
        """
        if total % self.world == 0:
            return self.even(total, "num_key_value_heads")
        if self.world % total:
            raise ValueError(f"num_key_value_heads: {total} cannot be cut for {self.world} ranks")
        first = self.rank * total // self.world
        return slice(first, first + 1)


class Collective(Protocol):
    """Joins partial results of all ranks."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`add_rms_norm` of the sum of `x` [T, D] over all ranks, the same on each; may reuse the memory of `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[S, n] of every rank to [S, ranks * n], the same on each: columns in the order of the ranks."""


class Alone:
    """The collective of a single rank."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Of `x` itself."""
        return add_rms_norm(x, residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x


class ProcessGroup:
    """Joins over a torch.distributed group: NCCL on GPUs, Gloo on CPU; few rows through `mail` if there is any."""

    def __init__(self, group: "torch.distributed.ProcessGroup", mail: Mailboxes | None = None) -> None:
        self._group = group
        self._mail = mail

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Of the sum over the group."""
        if self._mail is not None and self._mail.takes(x):
            return all_reduce_add_norm(x, residual, weight, eps, self._mail)
        torch.distributed.all_reduce(x, group=self._group)
        return add_rms_norm(x, residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        """The columns of all ranks."""
        world = torch.distributed.get_world_size(self._group)
        parts = x.new_empty((world * x.shape[0], x.shape[1]))
        torch.distributed.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
        return parts.view(world, *x.shape).transpose(0, 1).reshape(x.shape[0], -1)
