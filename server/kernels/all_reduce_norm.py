"""The sum over ranks, the residual addition and the norm behind them in one launch, for the few rows of a decode step.

Each rank has a mailbox in memory that all ranks have mapped: a place for every sender and row, three times over. A rank writes
its rows into the others' mailboxes and reads what they wrote from its own. What says that a row has come is the row: places
hold `EMPTY` words before, which no rank sends, so nobody waits for a flag behind the data, or for the memory of another GPU.

The three rounds of places make a second barrier needless. In round n a rank uses the places of n and empties those of n - 1,
which it has read; they are written again in n + 2. Whoever writes then has finished n + 1, for which it needed a word of every
rank that had begun n + 1, and so had finished emptying. A row's round is kept beside the mailbox, so that graphs can be
replayed; it advances on all ranks alike, as all of them launch the same rows.

There are two ways. In one shot every rank sends its row to all and adds up all of them, in the order of the ranks, so that the
sums are the same to the bit. In two, only the row's owner does so, and sends the new residual to the others: a hop more, but
two rows of traffic for each one instead of one for every rank.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_ROWS: Final = 128
SENDER_BYTES: Final = MAX_ROWS * 6144 * 2  # of one sender's rows in one round; the released width fits
NUM_ROUNDS: Final = 3
EMPTY: Final = -0x7FFF8000  # two bf16 of -0.0
_ONE_SHOT_BYTES: Final = 1 << 19  # that a rank may send in one shot beyond what it would send in two


@dataclass(frozen=True)
class Mailboxes:
    """The mailboxes of all ranks as one of them sees them. Rows of all calls have the same width.

    Attributes:
        rank: this one.
        addresses: [ranks] int64, where the mailboxes are mapped in this process.
        own: [num_words(ranks)] int32, this rank's mailbox; all `EMPTY` before the first call of any rank.
        rounds: [MAX_ROWS] int32 on the same device, the round of each row; zeros before the first call.
    """

    rank: int
    addresses: Tensor
    own: Tensor
    rounds: Tensor

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.addresses.shape[0]

    def takes(self, x: Tensor) -> bool:
        """Whether rows fit; the same on all ranks for the same shape."""
        fits = 0 < x.shape[0] <= MAX_ROWS and x.shape[0] * x.shape[1] * 2 <= SENDER_BYTES
        return fits and x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1] % 8 == 0


def num_words(world: int) -> int:
    """int32 words of a mailbox."""
    return NUM_ROUNDS * world * SENDER_BYTES // 4


def has_owners(num_bytes: int, world: int) -> bool:
    """Whether rows of `num_bytes` together go in two shots: when one would send much more."""
    return (world - 1) * num_bytes - 2 * num_bytes * (world - 1) // world > _ONE_SHOT_BYTES


def all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, mail: Mailboxes, *, owned: bool | None = None
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of `x` over all ranks, which call it together and get the same bits.

    Args:
        x: [T, D] bf16 that `mail` takes; this rank's part of the sum.
        residual: [T, D] bf16, the same on all ranks, contiguous.
        weight: [D] bf16.
        eps: added to the mean square.
        mail: the ranks' mailboxes.
        owned: whether rows go in two shots; as `has_owners` says if None.

    Returns:
        (normed, new residual), both [T, D]. The sum is rounded once, with the residual in it; zeros that are rounded to
        -0.0 in pairs become 0.0.
    """
    from server.kernels.all_reduce_norm_triton import all_reduce_add_norm_triton

    if owned is None:
        owned = has_owners(x.numel() * x.element_size(), mail.world)
    return all_reduce_add_norm_triton(x, residual, weight, eps, mail, owned=owned)
