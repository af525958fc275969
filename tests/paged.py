"""Paged attention batches for tests: shuffled pages, and NaN wherever no token has been written."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch


@dataclass(frozen=True)
class PagedCase:
    """A batch and the size of the page pool that its page table points into."""

    batch: AttentionBatch
    num_pages: int


def paged_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_size: int,
    *,
    seed: int = 0,
    device: str = "cpu",
    tables: Sequence[Sequence[int]] | None = None,
    num_pages: int | None = None,
) -> PagedCase:
    """Build a batch of sequences that end with `query_lens[b]` query tokens; single-token sequences must come first.

    Pages are handed out in random order and some stay free, unless `tables` names them; page table entries past a sequence's
    end name a page that holds none of its tokens.
    """
    assert all(1 <= q <= s for q, s in zip(query_lens, seq_lens, strict=True))
    num_decodes = next((b for b, q in enumerate(query_lens) if q > 1), len(query_lens))
    counts = [-(-s // page_size) for s in seq_lens]
    num_pages = num_pages or sum(counts) + 3
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    if tables is None:
        ends = torch.tensor(counts).cumsum(0).tolist()
        tables = [shuffled[end - count : end] for count, end in zip(counts, ends, strict=True)]
    free = next(page for page in reversed(shuffled) if not any(page in table for table in tables))
    table = torch.full((len(seq_lens), max(counts) + 1), free, dtype=torch.int32)
    for b, pages in enumerate(tables):
        table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(query_lens))
    slots = table[owners, positions // page_size].long() * page_size + positions % page_size
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = AttentionBatch(
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        query_start=starts.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        page_table=table.to(device),
        sequence_of_token=owners.to(torch.int32).to(device),
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        page_size=page_size,
    )
    return PagedCase(batch, num_pages)


def filled_kv_lane(
    case: PagedCase, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, list[Tensor]]:
    """A kv lane [P, Hkv, 2, page, D] with random tokens of every sequence, and those tokens as [Hkv, 2, seq_len, D] each."""
    batch, page = case.batch, case.batch.page_size
    generator = torch.Generator().manual_seed(seed)
    lane = torch.full((case.num_pages, num_kv_heads, 2, page, head_dim), torch.nan, dtype=dtype)
    contents = []
    for pages, seq_len in zip(batch.page_table.cpu(), batch.seq_lens.tolist(), strict=True):
        tokens = torch.randn((num_kv_heads, 2, seq_len, head_dim), generator=generator).to(dtype)
        for i, begin in enumerate(range(0, seq_len, page)):
            tile = tokens[:, :, begin : begin + page]
            lane[pages[i], :, :, : tile.shape[2]] = tile
        contents.append(tokens.to(batch.positions.device))
    return lane.to(batch.positions.device), contents


def filled_index_lane(
    case: PagedCase, index_dim: int, *, dtype: torch.dtype = torch.float32, seed: int = 2
) -> tuple[Tensor, list[Tensor]]:
    """An index lane [P, page, Di] with random keys of every sequence, and those keys as [seq_len, Di] each."""
    batch, page = case.batch, case.batch.page_size
    generator = torch.Generator().manual_seed(seed)
    lane = torch.full((case.num_pages, page, index_dim), torch.nan, dtype=dtype)
    contents = []
    for pages, seq_len in zip(batch.page_table.cpu(), batch.seq_lens.tolist(), strict=True):
        keys = torch.randn((seq_len, index_dim), generator=generator).to(dtype)
        for i, begin in enumerate(range(0, seq_len, page)):
            tile = keys[begin : begin + page]
            lane[pages[i], : tile.shape[0]] = tile
        contents.append(keys.to(batch.positions.device))
    return lane.to(batch.positions.device), contents
