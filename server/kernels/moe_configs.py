"""Tile sizes of the grouped products: tuned entries for an H200, and rules for everything else."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """How a product is cut.

    Attributes:
        block_n: rows of the weight per tile (of each half, where gate and up are computed together).
        block_k: inner dimension per step.
        num_warps: of a program.
        num_stages: steps in flight.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Constants and launch options of a kernel."""
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def few_configs(num_tokens: int, width: int, is_mxfp8: bool) -> tuple[TileConfig, TileConfig] | None:
    """Tiles of the first and the second product for a few tokens; None where sorting them is faster."""
    if num_tokens > 16:
        return None
    if is_mxfp8:
        return TileConfig(32, 128, 4, 4), TileConfig(16, 128, 2, 12)
    gate_up = TileConfig(32, 128, 2, 4)
    return gate_up, TileConfig(32, 256, 4, 8) if width >= 1024 else TileConfig(32, 128, 2, 8)


def grouped_config(rows_per_expert: float, element_size: int) -> tuple[int, TileConfig]:
    """Rows per tile and tiles of the weight for both products of the plain Triton kernels."""
    block_k = 64 if element_size == 2 else 32
    if rows_per_expert <= 8:
        return 16, TileConfig(32, 2 * block_k, 4, 4)
    if rows_per_expert <= 64:
        return 64, TileConfig(64, block_k, 4, 3)
    return 128, TileConfig(64, block_k, 8, 3)
