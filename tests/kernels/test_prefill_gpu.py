"""The prefill kernels at production sizes on a GPU, in bf16, against fp32 twins; tolerances are what bf16 inputs allow."""

from dataclasses import replace

import pytest
import torch

from server.kernels.block_topk import block_topk_torch
from server.kernels.block_topk_prefill import block_topk_prefill
from server.kernels.dense_attention import dense_attention_torch
from server.kernels.dense_prefill import dense_prefill
from server.kernels.index_score import index_score_torch
from server.kernels.index_score_prefill import index_score_prefill
from server.kernels.msa_select_prefill import msa_select_prefill
from server.kernels.sparse_attention import sparse_attention_torch
from server.kernels.sparse_prefill import sparse_prefill
from tests.kernels.prefill_reference import relative_error
from tests.paged import filled_index_lane, filled_kv_lane, paged_case

pytestmark = pytest.mark.gpu

PAGE, DIM, TOPK, SCALE = 128, 128, 16, 128**-0.5
ATTENTION_TOLERANCE = 4e-3  # two roundings to bf16: of the probabilities and of the result
NEAR_TIE = 1e-3  # scores of unit normal vectors are about 11 each and accumulate in fp32
RAGGED = ([3, 127, 600, 129], [131, 2049, 3001, 129])


def make(query_lens, seq_lens, num_kv_heads=4, seed=0):
    case = paged_case(query_lens, seq_lens, PAGE, seed=seed, device="cuda")
    index_lane, _ = filled_index_lane(case, DIM, dtype=torch.bfloat16)
    kv_lane, _ = filled_kv_lane(case, num_kv_heads, DIM, dtype=torch.bfloat16)
    num_tokens = len(case.batch.positions)
    generator = torch.Generator("cuda").manual_seed(seed)
    index_q = torch.randn((num_tokens, num_kv_heads, DIM), generator=generator, device="cuda").bfloat16()
    q = torch.randn((num_tokens, 16 * num_kv_heads, DIM), generator=generator, device="cuda").bfloat16()
    return case.batch, index_q, index_lane, q, kv_lane


def poisoned(shape, dtype):
    return torch.full(shape, torch.nan if dtype.is_floating_point else -99, dtype=dtype, device="cuda")


def select(index_q, lane, batch):
    out = poisoned((index_q.shape[1], len(index_q), TOPK), torch.int32)
    return msa_select_prefill(index_q, lane, batch, TOPK, 0, 1, out)


def attend(q, kv_lane, selection, batch):
    return sparse_prefill(q, kv_lane, selection, batch, SCALE, poisoned(q.shape, q.dtype))


def independent_selection(batch, num_heads, seed=0):
    """Uniformly random blocks: hardly any is shared by neighbours."""
    blocks = -(-batch.max_seq_len // PAGE)
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand((num_heads, len(batch.positions), blocks), generator=generator, device="cuda")
    return block_topk_torch(scores, batch, TOPK, 0, 1)


def assert_equal_or_near_tie(selection, scores):
    """Blocks chosen instead of others score within `NEAR_TIE` of them."""
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device="cuda")
    chosen.scatter_(-1, selection.clamp(min=0).long(), True)
    assert (selection >= 0).all()
    worst_in = scores.masked_fill(~chosen, torch.inf).amin(-1)
    best_out = scores.masked_fill(chosen, -torch.inf).amax(-1)
    assert (worst_in >= best_out - NEAR_TIE).all()


@pytest.mark.parametrize("num_heads", [4, 2, 1])
def test_scores_of_a_ragged_batch(num_heads):
    batch, index_q, lane, _, _ = make(*RAGGED, num_kv_heads=num_heads)
    expected = index_score_torch(index_q.float(), lane, batch)
    out = index_score_prefill(index_q, lane, batch, poisoned(expected.shape, torch.float32))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def test_selection_of_finished_scores_is_exact():
    batch, index_q, lane, _, _ = make([300], [40000])
    scores = index_score_torch(index_q, lane, batch)
    out = block_topk_prefill(scores, batch, TOPK, 0, 1, poisoned((4, 300, TOPK), torch.int32))
    assert torch.equal(out, block_topk_torch(scores, batch, TOPK, 0, 1))


@pytest.mark.parametrize(("query_len", "seq_len"), [(200, 2500), (513, 33000), (64, 140001)])
def test_selection_differs_from_fp32_only_in_near_ties(query_len, seq_len):
    batch, index_q, lane, _, _ = make([query_len], [seq_len], num_kv_heads=4)
    scores = index_score_torch(index_q.float(), lane, batch)
    own = (batch.positions // PAGE)[None, :, None].expand(4, -1, 1)
    assert_equal_or_near_tie(select(index_q, lane, batch), scores.scatter(-1, own, torch.inf))


@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize("kind", ["scored", "independent"])
def test_sparse_attention_of_a_ragged_batch(num_kv_heads, kind):
    batch, index_q, index_lane, q, kv_lane = make(*RAGGED, num_kv_heads=num_kv_heads)
    selection = select(index_q, index_lane, batch) if kind == "scored" else independent_selection(batch, num_kv_heads)
    expected = sparse_attention_torch(q.float(), kv_lane, selection, batch, SCALE).double()
    assert relative_error(attend(q, kv_lane, selection, batch), expected) < ATTENTION_TOLERANCE


def test_sparse_attention_is_bitwise_repeatable():
    batch, _, _, q, kv_lane = make([2048], [9000])
    selection = independent_selection(batch, 4)
    first = attend(q, kv_lane, selection, batch)
    assert all(torch.equal(first, attend(q, kv_lane, selection, batch)) for _ in range(3))


def test_dense_attention_of_a_ragged_batch():
    batch, _, _, q, kv_lane = make(*RAGGED)
    expected = dense_attention_torch(q.float(), kv_lane, batch, SCALE).double()
    out = dense_prefill(q, kv_lane, batch, SCALE, poisoned(q.shape, q.dtype))
    assert relative_error(out, expected) < ATTENTION_TOLERANCE


def test_a_captured_graph_follows_new_lengths_and_pages():
    batch, index_q, index_lane, q, kv_lane = make([700, 40], [2900, 5000], seed=1)
    other = make([30, 710], [1000, 4300], seed=2)[0]
    tensors = ("positions", "slot_mapping", "query_start", "seq_lens", "sequence_of_token")
    out, dense = poisoned(q.shape, q.dtype), poisoned(q.shape, q.dtype)

    def step():
        fresh = replace(batch)  # without the records of tiles that an earlier step made
        attend_to = select(index_q, index_lane.nan_to_num(0.5), fresh)
        sparse_prefill(q, kv_lane.nan_to_num(0.5), attend_to, fresh, SCALE, out)
        dense_prefill(q, kv_lane.nan_to_num(0.5), fresh, SCALE, dense)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name in tensors:
        getattr(batch, name).copy_(getattr(other, name))
    batch.page_table[:, : other.page_table.shape[1]].copy_(other.page_table % len(kv_lane))
    graph.replay()
    torch.cuda.synchronize()
    replayed, replayed_dense = out.clone(), dense.clone()
    step()
    assert torch.equal(replayed, out)
    assert torch.equal(replayed_dense, dense)
    assert not replayed.isnan().any()


def test_a_million_tokens_in_the_far_end_of_a_large_pool():
    num_queries, seq_len = 40, 1 << 20
    case = paged_case([num_queries], [seq_len], PAGE, device="cuda")
    far = 2**31 // (PAGE * DIM)  # index pages before it fill 31 bits of elements; KV pages do eight times over
    pages = case.num_pages
    index_lane = torch.empty((far + pages, PAGE, DIM), dtype=torch.bfloat16, device="cuda")
    index_lane[far:].normal_()
    batch = replace(case.batch, page_table=case.batch.page_table + far)
    index_q = torch.randn((num_queries, 4, DIM), device="cuda").bfloat16()
    selection = select(index_q, index_lane, batch)
    near = select(index_q, index_lane[far:], case.batch)
    assert torch.equal(selection, near)
    del index_lane
    kv_far = 2**31 // (4 * 2 * PAGE * DIM)
    kv_lane = torch.empty((kv_far + pages, 4, 2, PAGE, DIM), dtype=torch.bfloat16, device="cuda")
    kv_lane[kv_far:].normal_()
    batch = replace(case.batch, page_table=case.batch.page_table + kv_far)
    q = torch.randn((num_queries, 64, DIM), device="cuda").bfloat16()
    expected = sparse_attention_torch(q.float(), kv_lane, selection, batch, SCALE).double()
    assert relative_error(attend(q, kv_lane, selection, batch), expected) < ATTENTION_TOLERANCE
