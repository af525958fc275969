"""The tensors of the paged cache: three lanes, one page id.

A page id names the same `page_size` tokens in every lane and every layer. This module owns the memory and nothing else: who
holds a page is the block manager's business, what is written into it is the model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from server.kvcache.lanes import Lane


@dataclass(frozen=True)
class CacheSpec:
    """Shape of one page over all layers.

    Attributes:
        layer_is_sparse: one flag per layer; a sparse layer has index keys besides keys and values.
        num_kv_heads: key/value heads per layer (of this rank).
        head_dim: width of a key or value head.
        index_dim: width of an index key; there is one index-key head per sparse layer.
        page_size: tokens per page = tokens per sparse block.
        dtype: element type of all lanes.
    """

    layer_is_sparse: tuple[bool, ...]
    num_kv_heads: int
    head_dim: int
    index_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layer_is_sparse)

    @property
    def num_sparse_layers(self) -> int:
        """Layers with index keys."""
        return sum(self.layer_is_sparse)

    @property
    def num_dense_layers(self) -> int:
        """Layers without index keys."""
        return self.num_layers - self.num_sparse_layers

    @property
    def lane_bytes(self) -> dict[Lane, int]:
        """Bytes of one page in each lane, all layers."""
        width = self.page_size * self.dtype.itemsize
        kv_bytes = 2 * self.num_kv_heads * self.head_dim * width
        return {
            Lane.DENSE: self.num_dense_layers * kv_bytes,
            Lane.INDEX: self.num_sparse_layers * self.index_dim * width,
            Lane.SPARSE: self.num_sparse_layers * kv_bytes,
        }

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, all layers and lanes."""
        return sum(self.lane_bytes.values())

    def num_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` takes."""
        return -(-num_tokens // self.page_size)

    @cached_property
    def lane_rows(self) -> tuple[int, ...]:
        """For every layer, its row in its own lane: sparse layers and dense layers are counted separately."""
        rows, counts = [], [0, 0]
        for is_sparse in self.layer_is_sparse:
            rows.append(counts[is_sparse])
            counts[is_sparse] += 1
        return tuple(rows)


class CachePools:
    """All lanes of `num_pages` pages on one device.

    Attributes:
        dense: [num_dense_layers, P, num_kv_heads, 2, page, head_dim], K tile then V tile.
        index: [num_sparse_layers, P, page, index_dim].
        sparse: [num_sparse_layers, P, num_kv_heads, 2, page, head_dim].
    """

    def __init__(self, spec: CacheSpec, num_pages: int, device: torch.device) -> None:
        """Allocate; contents are undefined until the model writes them."""
        tile = (spec.num_kv_heads, 2, spec.page_size, spec.head_dim)
        self.spec = spec
        self.num_pages = num_pages
        self.device = device
        self.dense = torch.empty((spec.num_dense_layers, num_pages, *tile), dtype=spec.dtype, device=device)
        self.sparse = torch.empty((spec.num_sparse_layers, num_pages, *tile), dtype=spec.dtype, device=device)
        index_shape = (spec.num_sparse_layers, num_pages, spec.page_size, spec.index_dim)
        self.index = torch.empty(index_shape, dtype=spec.dtype, device=device)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.spec.page_size

    def kv_lane(self, layer: int) -> Tensor:
        """Keys and values of `layer`: a view [P, num_kv_heads, 2, page, head_dim]."""
        lane = self.sparse if self.spec.layer_is_sparse[layer] else self.dense
        return lane[self.spec.lane_rows[layer]]

    def index_lane(self, layer: int) -> Tensor | None:
        """Index keys of `layer`: a view [P, page, index_dim]; None on a dense layer."""
        return self.index[self.spec.lane_rows[layer]] if self.spec.layer_is_sparse[layer] else None

    def poison(self, page_ids: Sequence[int]) -> None:
        """Fill these pages with NaN in all lanes, so that a read before the write shows."""
        pages = torch.as_tensor(list(page_ids), dtype=torch.int64, device=self.device)
        for lane in (self.dense, self.index, self.sparse):
            lane.index_fill_(1, pages, float("nan"))
