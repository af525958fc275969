"""What kernels ask of their device, asked once: torch takes microseconds to answer, and a layer asks a dozen times."""

from functools import cache

import torch


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether this is a CUDA device of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
