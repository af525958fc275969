"""Times the attention kernels on one GPU: `python -m benchmarks.kernels [--stages prefill_score,...] [--out FOLDER]`.

Prints microseconds and the multiple of the physical limit beside the best public kernel, and writes JSON. Geometry: 64 query
heads, 4 KV heads, 4 index heads, dim 128, pages of 128 tokens, 16 blocks per query, bf16. A prefill case "q8192 ctx128k" is a
chunk of 8,192 queries that ends at position 131,072.
"""

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels_pointwise import STAGES as POINTWISE_STAGES
from benchmarks.kernels_pointwise import pointwise_rows
from benchmarks.report import RESULTS, Row, format_row, load_peers, make_row, write_json
from benchmarks.selections import corr_selection, rand_selection
from benchmarks.timing import limit_us, time_events
from server.kernels.attention_batch import AttentionBatch
from server.kernels.block_topk_prefill import select_blocks
from server.kernels.dense_prefill import dense_prefill
from server.kernels.index_score_prefill import GROUP, score_blocks
from server.kernels.msa_select_prefill import msa_select_prefill
from server.kernels.sparse_prefill import sparse_prefill

NUM_HEADS, NUM_KV_HEADS, DIM, PAGE, TOPK = 64, 4, 128, 128, 16
SCALE = DIM**-0.5
PREFILL_CASES = [(q, ctx) for q in (8192, 2048) for ctx in (32, 128, 512, 8)]  # queries, context in KiTokens
PREFILL_STAGES = ("prefill_score", "prefill_topk", "prefill_attention_corr", "prefill_attention_rand", "dense_prefill")
EXTRA_STAGES = ("prefill_select", "prefill_layer")


@dataclass(frozen=True)
class PrefillCase:
    """A chunk at the end of one paged sequence.

    Attributes:
        name: as printed.
        batch: its metadata, pages in random order.
        num_pages: pages in the lanes.
    """

    name: str
    batch: AttentionBatch
    num_pages: int


def prefill_case(num_queries: int, context_k: int) -> PrefillCase:
    """A case of `num_queries` queries that end at position `context_k` * 1024."""
    context = context_k * 1024
    num_pages = context // PAGE
    generator = torch.Generator().manual_seed(context)
    table = torch.randperm(num_pages, generator=generator)[None].to("cuda", torch.int32)
    positions = torch.arange(context - num_queries, context, device="cuda")
    batch = AttentionBatch(
        positions=positions,
        slot_mapping=table[0, positions // PAGE].long() * PAGE + positions % PAGE,
        query_start=torch.tensor([0, num_queries], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([context], dtype=torch.int32, device="cuda"),
        page_table=table,
        sequence_of_token=torch.zeros(num_queries, dtype=torch.int32, device="cuda"),
        num_decodes=0,
        max_query_len=num_queries,
        max_seq_len=context,
        page_size=PAGE,
    )
    return PrefillCase(f"q{num_queries} ctx{context_k}k", batch, num_pages)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def selection_rows(case: PrefillCase) -> Iterator[Row]:
    """Score, top-k, and both as one op."""
    batch, num_tokens = case.batch, case.batch.positions.shape[0]
    index_q, lane = _normal(num_tokens, NUM_KV_HEADS, DIM), _normal(case.num_pages, PAGE, DIM)
    scores = torch.empty((NUM_KV_HEADS, num_tokens, case.num_pages), device="cuda")
    group_max = torch.empty((NUM_KV_HEADS, num_tokens, -(-case.num_pages // GROUP)), device="cuda")
    out = torch.empty((NUM_KV_HEADS, num_tokens, TOPK), dtype=torch.int32, device="cuda")
    seen_keys = int((batch.positions + 1).sum())
    seen_blocks = int((batch.positions // PAGE + 1).sum())
    score_bytes = 2 * (index_q.numel() + lane.numel()) + 4 * NUM_KV_HEADS * seen_blocks
    score_limit = limit_us(score_bytes, 2 * NUM_KV_HEADS * DIM * seen_keys)
    topk_limit = limit_us(4 * NUM_KV_HEADS * seen_blocks + 4 * out.numel(), 0)
    timing = time_events(lambda: score_blocks(index_q, lane, batch, scores, group_max, fill=False))
    yield make_row("prefill_score", case.name, timing, score_limit)
    timing = time_events(lambda: select_blocks(scores, group_max, batch, TOPK, 0, 1, out))
    yield make_row("prefill_topk", case.name, timing, topk_limit)
    timing = time_events(lambda: msa_select_prefill(index_q, lane, batch, TOPK, 0, 1, out))
    yield make_row("prefill_select", case.name, timing, score_limit, ("prefill_score", "prefill_topk"))


def attention_rows(case: PrefillCase, stages: set[str]) -> Iterator[Row]:
    """Sparse attention on both kinds of selection, dense attention, and a layer's score + top-k + sparse attention."""
    batch, num_tokens = case.batch, case.batch.positions.shape[0]
    kv_lane, q = _normal(case.num_pages, NUM_KV_HEADS, 2, PAGE, DIM), _normal(num_tokens, NUM_HEADS, DIM)
    out = torch.empty_like(q)
    for kind, generate in (("corr", corr_selection), ("rand", rand_selection)):
        if f"prefill_attention_{kind}" not in stages:
            continue
        selection = generate(batch.positions, NUM_KV_HEADS, TOPK, PAGE)
        limit = _sparse_limit_us(selection, batch, q, case.num_pages)
        timing = time_events(lambda s=selection: sparse_prefill(q, kv_lane, s, batch, SCALE, out))  # type: ignore[misc]
        yield make_row(f"prefill_attention_{kind}", case.name, timing, limit)
        if kind == "corr" and "prefill_layer" in stages:
            yield _layer_row(case, q, kv_lane, selection, limit, out)
    if "dense_prefill" in stages:
        flops = 4 * NUM_HEADS * DIM * int((batch.positions + 1).sum())
        timing = time_events(lambda: dense_prefill(q, kv_lane, batch, SCALE, out))
        yield make_row("dense_prefill", case.name, timing, limit_us(2 * kv_lane.numel() + 4 * q.numel(), flops))


def _sparse_limit_us(selection: Tensor, batch: AttentionBatch, q: Tensor, num_pages: int) -> float:
    """Limit of attention over `selection`: products of visible keys; every selected page once, queries and outputs."""
    chosen = selection >= 0
    hidden = (PAGE - 1 - batch.positions % PAGE).sum() * NUM_KV_HEADS  # keys of own blocks behind the query
    visible = int(chosen.sum()) * PAGE - int(hidden)
    heads = torch.arange(NUM_KV_HEADS, device=q.device)[:, None, None]
    touched = torch.unique((heads * num_pages + selection)[chosen]).numel()
    flops = 4 * (NUM_HEADS // NUM_KV_HEADS) * DIM * visible
    return limit_us(touched * 4 * PAGE * DIM + 4 * q.numel(), flops)


def _layer_row(case: PrefillCase, q: Tensor, kv_lane: Tensor, selection: Tensor, attention_limit_us: float, out: Tensor) -> Row:
    """Score + top-k, then attention over the overlapping selection (random index keys would not overlap as real ones do)."""
    batch = case.batch
    index_q, lane = _normal(q.shape[0], NUM_KV_HEADS, DIM), _normal(case.num_pages, PAGE, DIM)
    selected = torch.empty_like(selection)

    def layer() -> None:
        msa_select_prefill(index_q, lane, batch, TOPK, 0, 1, selected)
        sparse_prefill(q, kv_lane, selection, batch, SCALE, out)

    score_limit = limit_us(0, 2 * NUM_KV_HEADS * DIM * int((batch.positions + 1).sum()))
    includes = ("prefill_score", "prefill_topk", "prefill_attention_corr")
    return make_row("prefill_layer", case.name, time_events(layer), score_limit + attention_limit_us, includes)


def rows_of(stages: set[str]) -> Iterator[Row]:
    """All rows of the wanted stages; decode stages come from `benchmarks.kernels_decode`."""
    for num_queries, context_k in PREFILL_CASES:
        case = prefill_case(num_queries, context_k)
        if stages & {"prefill_score", "prefill_topk", "prefill_select"}:
            yield from (row for row in selection_rows(case) if row.stage in stages)
        if stages & {"prefill_attention_corr", "prefill_attention_rand", "prefill_layer", "dense_prefill"}:
            yield from attention_rows(case, stages)
        torch.cuda.empty_cache()
    if any("decode" in stage for stage in stages):
        yield from importlib.import_module("benchmarks.kernels_decode").decode_rows(stages)
    if stages & set(POINTWISE_STAGES):
        yield from pointwise_rows(stages)


def main() -> None:
    """Measure, print and write."""
    decode_stages = ("decode_score", "decode_topk", "decode_attention", "decode_total", "dense_decode")
    parser = argparse.ArgumentParser(description="Time the attention kernels against their physical limits.")
    parser.add_argument("--stages", default=",".join((*PREFILL_STAGES, *EXTRA_STAGES, *decode_stages, *POINTWISE_STAGES)))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    peers = load_peers()
    rows = []
    for row in rows_of(set(arguments.stages.split(","))):
        rows.append(row)
        print(format_row(row, peers), flush=True)
    print(f"wrote {write_json(rows, f'python -m benchmarks.kernels --stages {arguments.stages}', arguments.out)}")


if __name__ == "__main__":
    main()
