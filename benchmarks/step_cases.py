"""Steps to time: decode batches and prefill chunks over a page pool of random keys and values."""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.limits import Chunk
from benchmarks.slices import Layers
from server.kernels.attention_batch import AttentionBatch
from server.kvcache.pools import CachePools, CacheSpec
from server.model.decode_graphs import context_ladder


@dataclass(frozen=True)
class StepCase:
    """One step.

    Attributes:
        token_ids: [T] int64.
        batch: where they stand.
        chunks: the same for the limits.
        page_uses: sequences that read a page, on average; above 1 when the pool cannot hold the batch.
    """

    token_ids: Tensor
    batch: AttentionBatch
    chunks: tuple[Chunk, ...]
    page_uses: float


def random_pools(spec: CacheSpec, num_bytes: int, device: torch.device) -> CachePools:
    """Pools of at most `num_bytes`, filled with normal values."""
    pools = CachePools(spec, max(1, num_bytes // spec.bytes_per_page), device)
    for lane in (pools.dense, pools.index, pools.sparse):
        lane.normal_()
    return pools


def pools_of(pools: CachePools, layers: Layers) -> CachePools:
    """Those of a part of a slice: the first lanes of each kind, in the same memory."""
    part = copy.copy(pools)
    part.spec = replace(pools.spec, layer_is_sparse=(False,) * layers.num_dense + (True,) * layers.num_sparse)
    part.dense = pools.dense[: layers.num_dense]
    part.index, part.sparse = pools.index[: layers.num_sparse], pools.sparse[: layers.num_sparse]
    return part


def decode_case(batch_size: int, context: int, pools: CachePools, vocab_size: int, window: int) -> StepCase:
    """A step of `batch_size` sequences that have `context` tokens with the one of this step; pages in random order.

    Kernels are launched for the longest context that the serving graph of such a step takes, in a model of `window` tokens.

    Where the pool is too small, sequences share pages. What a kernel reads between two uses of one is then larger than the
    second-level cache by far, so it comes from memory each time.
    """
    device, page = pools.device, pools.page_size
    num_blocks = -(-context // page)
    count = batch_size * num_blocks
    table = (torch.randperm(count, device=device) % pools.num_pages).view(batch_size, num_blocks).int()
    bound = next(rung for rung in context_ladder(window) if rung >= context)
    seq_lens = torch.full((batch_size,), context, dtype=torch.int32, device=device)
    positions = seq_lens.long() - 1
    batch = AttentionBatch(
        positions=positions,
        slot_mapping=table[:, -1].long() * page + positions % page,
        query_start=torch.arange(batch_size + 1, dtype=torch.int32, device=device),
        seq_lens=seq_lens,
        page_table=torch.nn.functional.pad(table, (0, -(-bound // page) - num_blocks)),
        sequence_of_token=torch.arange(batch_size, dtype=torch.int32, device=device),
        num_decodes=batch_size,
        max_query_len=1,
        max_seq_len=bound,
        page_size=page,
    )
    token_ids = torch.randint(vocab_size, (batch_size,), device=device)
    return StepCase(token_ids, batch, (Chunk(context - 1, 1),) * batch_size, max(1.0, count / pools.num_pages))


def prefill_case(start: int, num_tokens: int, pools: CachePools, vocab_size: int) -> StepCase:
    """A step of one chunk behind `start` tokens that are in the cache.

    Raises:
        ValueError: the pool is too small.
    """
    device, page, end = pools.device, pools.page_size, start + num_tokens
    num_blocks = math.ceil(end / page)
    if num_blocks > pools.num_pages:
        raise ValueError(f"{end} tokens do not fit a pool of {pools.num_pages} pages")
    generator = torch.Generator().manual_seed(0)  # chunks of one sequence have the same pages
    table = torch.randperm(pools.num_pages, generator=generator)[None, :num_blocks].to(device, torch.int32)
    positions = torch.arange(start, end, device=device)
    batch = AttentionBatch(
        positions=positions,
        slot_mapping=table[0, positions // page].long() * page + positions % page,
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
        page_table=table,
        sequence_of_token=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=end,
        page_size=page,
    )
    return StepCase(torch.randint(vocab_size, (num_tokens,), device=device), batch, (Chunk(start, num_tokens),), 1.0)
