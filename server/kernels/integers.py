"""Integer arithmetic for launches. Triton's functions of these names are made for kernels and slow on the host."""


def cdiv(x: int, y: int) -> int:
    """The quotient of two positive integers, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, for `n` >= 1."""
    return 1 << (n - 1).bit_length()
