"""Rows of device memory for the few sequences that need one, in a tensor that grows."""

import torch
from torch import Tensor


class RowPool:
    """Rows of equal width. They are taken and given back in the order of the stream, like everything that reads them.

    Attributes:
        tensor: [rows, width]; another one after the pool has grown.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor: Tensor = torch.zeros((1, width), dtype=dtype, device=device)
        self._free = [0]

    def take(self, values: Tensor) -> int:
        """A row's index after copying `values` [width] on the host to it; twice as many rows when none is free."""
        if not self._free:
            num_rows = self.tensor.shape[0]
            self.tensor = torch.cat([self.tensor, torch.zeros_like(self.tensor)])
            self._free = list(range(num_rows, 2 * num_rows))
        row = self._free.pop()
        copy_from_host(self.tensor[row], values)
        return row

    def give_back(self, row: int) -> None:
        """Free a row that was taken."""
        self._free.append(row)


def copy_from_host(target: Tensor, values: Tensor) -> None:
    """Overwrite device memory with a host tensor in the order of the stream; the host does not wait."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
