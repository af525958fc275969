"""Steps of a model past scheduler and runner, on shuffled pages that hold NaN until they are written."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from server.kvcache.pools import CachePools
from server.model.config import cache_spec
from server.model.m3 import M3Model
from tests.paged import PagedCase, paged_case


@dataclass
class PagedRunner:
    """Feeds our model through NaN-filled pages, keeping every sequence's page table."""

    model: M3Model
    num_pages: int
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = CachePools(cache_spec(self.model.config, self.model.dtype), self.num_pages, self.model.device)
        self.pools.poison(range(self.num_pages))
        self._free = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(7)).tolist()

    def case(self, sequence_ids: Sequence[int], query_lens: Sequence[int]) -> PagedCase:
        """A batch that continues these sequences by so many tokens; single tokens first."""
        page_size = self.pools.page_size
        for sequence_id, query_len in zip(sequence_ids, query_lens, strict=True):
            self.lengths[sequence_id] = self.lengths.get(sequence_id, 0) + query_len
            table = self.tables.setdefault(sequence_id, [])
            while len(table) * page_size < self.lengths[sequence_id]:
                table.append(self._free.pop())
        seq_lens = [self.lengths[sequence_id] for sequence_id in sequence_ids]
        tables = [self.tables[sequence_id] for sequence_id in sequence_ids]
        device = str(self.model.device)
        return paged_case(query_lens, seq_lens, page_size, tables=tables, num_pages=self.num_pages, device=device)

    def step(
        self, chunks: Sequence[tuple[int, Sequence[int]]], embeddings: tuple[Tensor, Tensor] | None = None
    ) -> list[Tensor]:
        """Run one step over (sequence id, token ids) chunks; logits [tokens, vocab] of each."""
        query_lens = [len(token_ids) for _, token_ids in chunks]
        case = self.case([sequence_id for sequence_id, _ in chunks], query_lens)
        flat = torch.tensor([token_id for _, token_ids in chunks for token_id in token_ids], device=self.model.device)
        hidden = self.model.forward(flat, case.batch, self.pools, embeddings)
        return list(self.model.logits(hidden).split(query_lens))
