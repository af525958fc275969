"""The ranks that compute one model together, as a runner and the start of an engine see them.

Rank 0 leads: it samples, and what it sampled counts on every rank. All ranks make the same calls in the same order, which
follows from the plans that they carry out; a rank that decided by itself would leave the others waiting.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from server.model.shard import Alone, Collective, Shard


class Ranks(Protocol):
    """This rank and its calls to the others."""

    @property
    def shard(self) -> Shard:
        """Which rank this is, and of how many."""

    @property
    def collective(self) -> Collective:
        """Joins the partial results of the model."""

    def share(self, token_ids: Tensor) -> None:
        """Give every rank the values of rank 0: [S] int64 on the device, in place and in the order of the stream."""

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags are up on one rank or another; returns when all ranks have come so far."""

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; returns when all ranks have come so far."""


class OneRank:
    """The only rank of its model.

    Attributes:
        shard: everything.
        collective: adds nothing.
    """

    def __init__(self) -> None:
        self.shard = Shard()
        self.collective: Collective = Alone()

    def share(self, token_ids: Tensor) -> None:
        """They are there already."""

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """The flags."""
        return list(flags)

    def least(self, number: int) -> int:
        """The number."""
        return number
