"""Which blocks a query of a sparse layer attends to, given their scores."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectionRule:
    """The best blocks, some of them forced.

    Attributes:
        topk: blocks per query, forced ones included (`sparse_topk_blocks`).
        num_init_blocks: leading blocks that are forced (`sparse_init_block`).
        num_local_blocks: blocks that end with the query's own and are forced (`sparse_local_block`).
    """

    topk: int
    num_init_blocks: int
    num_local_blocks: int
