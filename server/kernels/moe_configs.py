"""Tile sizes of the grouped products: tuned entries for an H200, and rules for everything else."""

from dataclasses import dataclass
from math import inf


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


@dataclass(frozen=True)
class FewTile:
    """What a program of `moe_few_mxfp8` takes at a time.

    Attributes:
        octets: groups of 8 weight rows, even; in the first product half of them are gate rows, half up rows.
        chunks: chunks of 64 inputs per warp and round.
        warps: each has chunks of its own.
        registers: most that a thread may use, so that more programs fit on a multiprocessor; None is up to the compiler.
        stages: of the second product: rounds of weights in flight through shared memory; 0 for two in registers.
    """

    octets: int
    chunks: int
    warps: int
    registers: int | None = None
    stages: int = 0

    def options(self) -> dict[str, int | None]:
        """Constants and launch options of a kernel."""
        return {"J": self.octets, "C": self.chunks, "B": self.warps, "num_warps": self.warps, "maxnreg": self.registers}


@dataclass(frozen=True)
class HopperConfig:
    """How rows are cut and how deep the rings are.

    Attributes:
        sizes: widths of the product that are compiled, ascending; powers of two up to 256 or sums of two of them, up to 288.
        parts: pieces of 64 columns per stage; even for MXFP8, which converts 128 columns at a time.
        w_stages: stages of 128 weight rows in flight.
        x_stages: pieces of activations in flight, in a ring of their own (MXFP8 and wide products); 0 if they travel with the
            weights.
        programs_per_processor: 1 or 2; two share the shared memory and the registers.
    """

    sizes: tuple[int, ...]
    parts: int
    w_stages: int
    x_stages: int = 0
    programs_per_processor: int = 1

    @property
    def step_rows(self) -> int:
        """Rows of a tile that is not an expert's last."""
        return min(self.sizes[-1], 256)


def few_configs(num_tokens: int, width: int) -> tuple[TileConfig, TileConfig] | None:
    """Tiles of the first and the second product for a few tokens; None where sorting them is as fast."""
    if num_tokens > (8 if width >= 1024 else 16):
        return None
    if width >= 1024:
        return TileConfig(32, 128, 2, 4), TileConfig(32, 256, 2, 8)
    return TileConfig(32, 128, 4, 8) if num_tokens <= 2 else TileConfig(32, 128, 2, 4), TileConfig(32, 128, 2, 12)


def few_mxfp8_tiles(num_tokens: int, width: int) -> tuple[FewTile, FewTile] | None:
    """Tiles of both products with MXFP8 weights on Hopper, as measured on an H200; None where sorting tokens is as fast.

    Of the first product's tiles, that one is the fastest whose programs fill the device a whole number of times.
    """
    if num_tokens > 8:
        return None
    if width >= 1024:
        return FewTile(2, 2, 4), FewTile(2, 1, 8, 80, 4)
    if num_tokens in (3, 4):
        return FewTile(2, 1, 4), FewTile(4, 1, 8, 128)
    return FewTile(2, 2, 8 if num_tokens == 1 else 4), FewTile(4, 1, 8, 128)


def grouped_config(rows_per_expert: float, element_size: int) -> tuple[int, TileConfig]:
    """Rows per tile and tiles of the weight for both products of the plain Triton kernels."""
    if rows_per_expert <= 8:
        return 16, TileConfig(32, 256, 4, 3) if element_size == 2 else TileConfig(32, 64, 4, 3)
    block_k = 128 if element_size == 2 else 32
    if rows_per_expert <= 24:
        return 32, TileConfig(64, block_k, 4, 3)
    if rows_per_expert <= 64:
        return 64, TileConfig(64, block_k // 2, 4, 3)
    return 128, TileConfig(64, block_k // 2, 8, 3)


def hopper_configs(rows_per_expert: float, is_mxfp8: bool) -> tuple[HopperConfig, HopperConfig]:
    """Rings of the Hopper kernels for the first and the second product; both have the same row tiles."""
    for largest, first, second in _HOPPER[is_mxfp8]:
        if rows_per_expert <= largest:
            return first, second
    raise AssertionError("the last entry has no bound")


def _same(config: HopperConfig) -> tuple[HopperConfig, HopperConfig]:
    return config, config


_WIDE = (64, 128, 192, 256, 288)

# By format: (up to how many rows per expert on average, first product, second product), tuned on an H200.
_HOPPER = {
    False: (
        (4.0, *_same(HopperConfig((16,), 2, 5))),
        (32.0, *_same(HopperConfig((16, 32), 2, 5))),
        (96.0, *_same(HopperConfig((64, 128), 1, 5))),
        (inf, *_same(HopperConfig(_WIDE, 1, 4))),
    ),
    True: (
        (4.0, HopperConfig((16,), 4, 5), HopperConfig((16,), 2, 4, 0, 2)),
        (32.0, *_same(HopperConfig((32, 64), 2, 6))),
        (96.0, *_same(HopperConfig((64, 128), 2, 4))),
        (inf, *_same(HopperConfig(_WIDE, 2, 3, 4))),
    ),
}
