"""`sample_rows` on the GPU: blocks of every row in parallel, and between them one program per row.

Up to seven kernels, those that some row needs. `stats`: adjusted logits, and the best one of each block. `weigh`: the sum of
weights of each block, and for rows with top_k or top_p a histogram of the tokens that may matter, over 1/64 nat below the best.
`cut`: the few bins in which these can end. `gather`: the tokens of those bins, in any order. `resolve`: the exact ends, by
bisection among them. `keep`: each block's sum again without what the filters took away. `draw`: the token. Weights are
integers, so sums do not depend on the order of work; a token depends on its own row alone, and no grid depends on data.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.integers import next_power_of_2
from server.kernels.launch import pdl_options
from server.kernels.sampling import SamplingTable, SamplingWork
from server.kernels.sampling_adjust import Adjustments
from server.kernels.sampling_blocks_triton import gather_kernel, keep_kernel, weigh_kernel
from server.kernels.sampling_ends_triton import cut_kernel, draw_kernel, resolve_kernel
from server.kernels.sampling_rows_triton import NUM_BINS, row_width
from server.kernels.sampling_stats_triton import stats_kernel

BLOCK = 2048
CAPACITY = 8192


@dataclass(frozen=True)
class SamplingWorkspace:
    """Memory of `sample_rows_triton` for up to R rows; what it holds between calls is nobody's.

    Attributes:
        block: logits of a block, a power of two.
        capacity: tokens that `gather` can keep of a row; with more of them `resolve` reads the row instead.
        space: [R, width] int64, see `sampling_rows_triton`.
    """

    block: int
    capacity: int
    space: Tensor

    @classmethod
    def allocate(
        cls, max_rows: int, vocab_size: int, device: torch.device, *, block: int = BLOCK, capacity: int = CAPACITY
    ) -> "SamplingWorkspace":
        """For rows of `vocab_size` logits: 160 KiB each."""
        width = row_width(-(-vocab_size // block), capacity)
        return cls(block, capacity, torch.empty((max_rows, width), dtype=torch.int64, device=device))


def sample_rows_triton(
    logits: Tensor,
    table: SamplingTable,
    slots: Tensor,
    positions: Tensor,
    work: SamplingWork,
    out: Tensor,
    workspace: SamplingWorkspace,
    adjustments: Adjustments | None = None,
) -> None:
    """See `sample_rows`; nothing is allocated without `adjustments`, and nothing waits for the device."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_blocks = -(-vocab_size // workspace.block)
    grid = (num_rows, num_blocks)
    shape = {"NUM_BLOCKS": num_blocks, "CAPACITY": workspace.capacity, "BLOCK": workspace.block, "num_warps": 8}
    options = shape | {"BLOCKS": next_power_of_2(num_blocks)} | pdl_options(logits.device)
    adjusted = logits
    edits: tuple[Tensor, ...] = (out,) * 7
    if adjustments is not None:
        adjusted = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
        edits = adjustments.tensors()
    where = (slots, table.floats, table.ints, workspace.space, vocab_size)
    stats_kernel[grid](
        logits,
        logits.stride(0),
        *where,
        adjusted,
        *edits,
        ADJUST=adjustments is not None,
        SHARE=next_power_of_2(-(-NUM_BINS.value // num_blocks)),
        **shape,
        **pdl_options(logits.device),
    )
    rows = (adjusted, adjusted.stride(0), *where)
    if work >= SamplingWork.PLAIN:
        weigh_kernel[grid](*rows, **options)
    if work >= SamplingWork.FILTERED:
        cut_kernel[(num_rows,)](*rows, **options)
        gather_kernel[grid](*rows, **options)
        resolve_kernel[(num_rows,)](*rows, **options)
        keep_kernel[grid](*rows, **options)
    draw_kernel[(num_rows,)](*rows, positions, out, edits[3], num_rows, COUNT=adjustments is not None, **options)
