"""Decode kernels on a GPU: microseconds per call in a CUDA graph over rotating inputs, at the geometry of the released model.

Every input set has its own pages, queries and tables, and a graph runs through so many sets that none finds its data in the
second-level cache. A row's limit is the memory traffic that no kernel can avoid over the measured copy rate.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.report import Row
from benchmarks.timing import Timing, limit_us, time_graph
from server.kernels.attention_batch import AttentionBatch
from server.kernels.block_topk_decode import block_topk_decode
from server.kernels.dense_decode import dense_decode
from server.kernels.index_score_decode import index_score_decode
from server.kernels.msa_decode import msa_decode
from server.kernels.selection_rule import SelectionRule
from server.kernels.sparse_decode import HostTier, sparse_decode

STAGES = ("decode_score", "decode_topk", "decode_attention", "decode_total", "dense_decode")
HOST_STAGE = "decode_attention_host"
BATCHES, CONTEXTS = (1, 8, 32, 64), (8192, 32768, 131072, 524288)
HOST_BATCHES, HOST_FRACTIONS = (1, 4, 8, 32), (0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 0.85, 1.0)
_PAGE, _DIM, _HEADS, _KV_HEADS, _TOPK = 128, 128, 64, 4, 16
_SCALE = _DIM**-0.5
_RULE = SelectionRule(_TOPK, 0, 1)
_TILE_BYTES = 2 * _PAGE * _DIM * 2  # keys and values of a page and KV head
_INDEX_PAGE_BYTES = _PAGE * _DIM * 2
_ROTATED_BYTES = 300 << 20  # what all input sets of a graph read: several times the cache
_HOST_SETS = 8
_GRAPH_US, _LAUNCH_US = 2000, 2  # work of a graph, least time of a call
_MAX_DENSE_TOKENS = 32 * 524288  # where a call takes 8 ms
_MAX_POOL_PAGES = 90_000  # 24 GB of K/V: longer batches share pages, far apart in time


@dataclass(frozen=True)
class _InputSet:
    """One sequence batch of a rotation and the tensors that the kernels write."""

    batch: AttentionBatch
    q: Tensor  # [B, Hq, D]
    index_q: Tensor  # [B, Hi, Di]
    scores: Tensor  # [Hi, B, max_blocks] fp32
    selection: Tensor  # [Hi, B, topk] int32, own block first, then random ones
    written: Tensor  # [Hi, B, topk] int32
    out: Tensor  # [B, Hq, D]


@dataclass(frozen=True)
class _Pools:
    index_lane: Tensor
    kv_lane: Tensor

    @classmethod
    def random(cls, num_pages: int) -> "_Pools":
        index_lane = torch.empty((num_pages, _PAGE, _DIM), dtype=torch.bfloat16, device="cuda").normal_()
        kv_lane = torch.empty((num_pages, _KV_HEADS, 2, _PAGE, _DIM), dtype=torch.bfloat16, device="cuda").normal_()
        return cls(index_lane, kv_lane)


def _input_set(batch_size: int, context: int, pools: _Pools, number: int) -> _InputSet:
    """Set `number` of a rotation: its pages follow those of the set before, in random order, around the pool."""
    num_blocks, num_pages = context // _PAGE, pools.index_lane.shape[0]
    count = batch_size * num_blocks
    pages = (torch.randperm(count, device="cuda") + number * count) % num_pages
    seq_lens = torch.full((batch_size,), context, dtype=torch.int32, device="cuda")
    table = pages.view(batch_size, num_blocks).int()
    batch = AttentionBatch(
        positions=seq_lens.long() - 1,
        slot_mapping=table[:, -1].long() * _PAGE + _PAGE - 1,
        query_start=torch.arange(batch_size + 1, dtype=torch.int32, device="cuda"),
        seq_lens=seq_lens,
        page_table=table,
        sequence_of_token=torch.arange(batch_size, dtype=torch.int32, device="cuda"),
        num_decodes=batch_size,
        max_query_len=1,
        max_seq_len=context,
        page_size=_PAGE,
    )
    scores = torch.randn((_KV_HEADS, batch_size, num_blocks), device="cuda")
    ranked = scores.clone()
    ranked[..., -1] = torch.inf
    selection = ranked.topk(_TOPK, dim=-1).indices.int()
    q = torch.randn((batch_size, _HEADS, _DIM), device="cuda").bfloat16()
    index_q = torch.randn((batch_size, _KV_HEADS, _DIM), device="cuda").bfloat16()
    return _InputSet(batch, q, index_q, scores, selection, torch.empty_like(selection), torch.empty_like(q))


def _calls(pools: _Pools) -> dict[str, Callable[[_InputSet], None]]:
    index_lane, kv_lane = pools.index_lane, pools.kv_lane
    return {
        "decode_score": lambda s: index_score_decode(s.index_q, index_lane, s.batch, s.scores),
        "decode_topk": lambda s: block_topk_decode(s.scores, s.batch, _TOPK, 0, 1, s.written),
        "decode_attention": lambda s: sparse_decode(s.q, kv_lane, s.selection, s.batch, _SCALE, s.out),
        "decode_total": lambda s: msa_decode(s.q, s.index_q, kv_lane, index_lane, s.batch, _RULE, _SCALE, s.out),
        "dense_decode": lambda s: dense_decode(s.q, kv_lane, s.batch, _SCALE, s.out),
    }


def _traffic_bytes(stage: str, batch_size: int, context: int) -> int:
    pages = batch_size * context // _PAGE
    score, attention = pages * _INDEX_PAGE_BYTES, batch_size * _KV_HEADS * _TOPK * _TILE_BYTES
    return {
        "decode_score": score,
        "decode_topk": pages * _KV_HEADS * 4,
        "decode_attention": attention,
        "decode_total": score + attention,
        "dense_decode": pages * _KV_HEADS * _TILE_BYTES,
    }[stage]


def decode_rows(stages: set[str]) -> Iterator[Row]:
    """Measure the wanted decode stages at all batch sizes and contexts; needs 30 GB of GPU memory."""
    if stages & set(STAGES):
        pools = _Pools.random(_MAX_POOL_PAGES)
        for context in CONTEXTS:
            for batch_size in BATCHES:
                yield from _rows_of(batch_size, context, pools, stages)
    if HOST_STAGE in stages:
        for batch_size in HOST_BATCHES:
            yield from host_tier_rows(batch_size)


def _rows_of(batch_size: int, context: int, pools: _Pools, stages: set[str]) -> Iterator[Row]:
    sets: list[_InputSet] = []
    for stage, call in _calls(pools).items():
        if stage not in stages or (stage == "dense_decode" and batch_size * context > _MAX_DENSE_TOKENS):
            continue
        traffic = _traffic_bytes(stage, batch_size, context)
        while len(sets) < max(2, min(64, -(-_ROTATED_BYTES // traffic))):
            sets.append(_input_set(batch_size, context, pools, len(sets)))
        timing = _time(call, sets, traffic)
        includes = ("decode_score", "decode_topk", "decode_attention") if stage == "decode_total" else ()
        yield _row(stage, f"B{batch_size} ctx{context // 1024}k", timing, traffic, includes)


def host_tier_rows(batch_size: int) -> Iterator[Row]:
    """Measure sparse attention with fractions of all pages only in pinned host memory; the limit is that of all on the GPU."""
    num_tiles = _KV_HEADS * _TOPK  # of a sequence; each selected tile has a page of its own here, so that none is read twice
    num_pages = _HOST_SETS * batch_size * num_tiles
    pools = _Pools.random(num_pages)
    host = torch.empty_like(pools.kv_lane, device="cpu", pin_memory=True)
    heads = torch.arange(num_tiles, dtype=torch.int32, device="cuda").view(_KV_HEADS, 1, _TOPK)
    sets = []
    for number in range(_HOST_SETS):
        one = _input_set(batch_size, num_tiles * _PAGE, pools, number)
        one.selection.copy_(heads.expand(-1, batch_size, -1))
        sets.append(one)
    ids = torch.arange(num_pages, dtype=torch.int32, device="cuda")
    for fraction in HOST_FRACTIONS:
        on_host = torch.rand(num_pages, device="cuda") < fraction
        tier = HostTier(host, torch.where(on_host, -1 - ids, ids))

        def call(s: _InputSet, tier: HostTier = tier) -> None:
            sparse_decode(s.q, pools.kv_lane, s.selection, s.batch, _SCALE, s.out, tier)

        traffic = _traffic_bytes("decode_attention", batch_size, 0)
        yield _row(HOST_STAGE, f"B{batch_size} host{fraction:.0%}", _time(call, sets, traffic), traffic)


def _time(call: Callable[[_InputSet], None], sets: list[_InputSet], num_bytes: int) -> Timing:
    """Go around the sets until a graph is so long that its own launch does not count."""
    rounds = max(1, math.ceil(_GRAPH_US / (len(sets) * max(limit_us(num_bytes, 0), _LAUNCH_US))))
    return time_graph([partial(call, s) for s in sets] * rounds, replays=10)


def _row(stage: str, case: str, timing: Timing, num_bytes: int, includes: tuple[str, ...] = ()) -> Row:
    """A row whose limit keeps the digits that a selection's nanoseconds need."""
    limit = round(limit_us(num_bytes, 0), 6)
    return Row(stage, case, round(timing.us, 2), limit, round(timing.low_us, 2), round(timing.high_us, 2), includes)
