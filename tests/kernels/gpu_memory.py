"""Free GPU memory that holds NaN, so that a kernel which reads what it did not write gets caught."""

import torch


def poison_free_memory():
    """Fill what the next allocations take with NaN: 32 MiB for small ones and 256 MiB for large ones, which are kept apart."""
    sizes = [1 << 17] * 64 + [1 << 26]
    poison = [torch.full((size,), torch.nan, device="cuda") for size in sizes]
    del poison
