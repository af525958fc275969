"""The twins of the attention ops against loops in float64, on shuffled pages whose free slots are NaN."""

import math

import pytest
import torch

from server.kernels import sparse_attention as sparse_module
from server.kernels.block_topk import block_topk_torch
from server.kernels.dense_attention import dense_attention
from server.kernels.index_score import index_score_torch, num_blocks
from server.kernels.msa_select import msa_select_torch
from server.kernels.sparse_attention import sparse_attention_torch
from tests.paged import filled_index_lane, filled_kv_lane, paged_case

# (query lengths, sequence lengths): decodes first, then prefills with and without a cached prefix.
RAGGED = [
    ([1], [1]),
    ([1, 1, 1], [63, 100, 16]),
    ([40], [40]),
    ([1, 1, 33, 2, 111], [1, 177, 100, 2, 111]),
]
HEADS, KV_HEADS, DIM, INDEX_DIM, PAGE = 6, 2, 24, 20, 16
SCALE = DIM**-0.5


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def owners(batch):
    """(token, sequence, position) of every query."""
    return zip(range(len(batch.positions)), batch.sequence_of_token.tolist(), batch.positions.tolist(), strict=True)


def reference_scores(index_q, keys, batch):
    scores = torch.full((index_q.shape[1], index_q.shape[0], num_blocks(batch)), -math.inf, dtype=torch.float64)
    for t, b, position in owners(batch):
        dots = index_q[t].double() @ keys[b][: position + 1].double().T  # [Hi, position + 1]
        for block in range(position // batch.page_size + 1):
            scores[:, t, block] = dots[:, block * batch.page_size : (block + 1) * batch.page_size].amax(-1)
    return scores


def reference_attention(q, contents, batch, attended_blocks):
    """`attended_blocks(kv_head, token)` names the blocks of a query, None all."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // KV_HEADS
    for t, b, position in owners(batch):
        for head in range(q.shape[1]):
            blocks = attended_blocks(head // group, t)
            seen = [j for j in range(position + 1) if blocks is None or j // batch.page_size in blocks]
            keys, values = contents[b][head // group].double()[:, seen]
            out[t, head] = ((keys @ q[t, head].double()) * SCALE).softmax(0) @ values
    return out


def selected(selection):
    return lambda kv_head, token: set(selection[kv_head, token].tolist()) - {-1}


@pytest.mark.parametrize(("query_lens", "seq_lens"), RAGGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_score(query_lens, seq_lens, dtype):
    case = paged_case(query_lens, seq_lens, PAGE)
    lane, keys = filled_index_lane(case, INDEX_DIM, dtype=dtype)
    index_q = randn(sum(query_lens), 3, INDEX_DIM, dtype=dtype)
    scores = index_score_torch(index_q, lane, case.batch)
    expected = reference_scores(index_q, keys, case.batch)
    assert scores.dtype == torch.float32
    assert torch.equal(scores.isinf(), expected.isinf())
    torch.testing.assert_close(scores.double(), expected, atol=1e-4, rtol=1e-5)


def test_index_score_in_small_chunks_writes_into_a_strided_output(monkeypatch):
    monkeypatch.setattr("server.kernels.index_score._CHUNK_BYTES", 1)
    case = paged_case([1, 37], [50, 90], PAGE)
    lane, keys = filled_index_lane(case, INDEX_DIM)
    index_q = randn(38, 2, INDEX_DIM)
    out = torch.full((2, 40, num_blocks(case.batch)), 7.0)
    index_score_torch(index_q, lane, case.batch, out[:, 1:39])
    torch.testing.assert_close(out[:, 1:39].double(), reference_scores(index_q, keys, case.batch), atol=1e-4, rtol=1e-5)
    assert (out[:, [0, 39]] == 7.0).all()


def reference_topk(scores, position, page, topk, num_init, num_local):
    own = position // page
    forced = {b for b in range(own + 1) if b < num_init or b > own - num_local}
    ranked = sorted(range(own + 1), key=lambda b: (-math.inf if b in forced else -scores[b], b))[:topk]
    return ranked + [-1] * (topk - len(ranked))


@pytest.mark.parametrize(("topk", "num_init", "num_local"), [(4, 0, 1), (4, 1, 2), (16, 0, 1), (3, 0, 0), (1, 0, 1)])
@pytest.mark.parametrize("scores_kind", ["distinct", "tied", "all -inf"])
def test_block_topk_orders_by_score_then_block(topk, num_init, num_local, scores_kind):
    case = paged_case([1, 1, 90], [177, 3, 100], PAGE)
    batch = case.batch
    scores = randn(2, 92, num_blocks(batch))
    if scores_kind == "tied":
        scores = scores.round()
    elif scores_kind == "all -inf":
        scores.fill_(-math.inf)
    for t, _, position in owners(batch):
        scores[:, t, position // PAGE + 1 :] = -math.inf
    selection = block_topk_torch(scores, batch, topk, num_init, num_local)
    assert selection.dtype == torch.int32
    for t, _, position in owners(batch):
        for head in range(2):
            expected = reference_topk(scores[head, t].tolist(), position, PAGE, topk, num_init, num_local)
            assert selection[head, t].tolist() == expected


def test_block_topk_never_prefers_nan():
    case = paged_case([1], [100], PAGE)
    scores = torch.tensor([[[1.0, math.nan, 3.0, 2.0, math.nan, 0.0, math.nan]]])
    assert block_topk_torch(scores, case.batch, 4, 0, 1).tolist() == [[[6, 2, 3, 0]]]
    assert block_topk_torch(scores, case.batch, 8, 0, 1).tolist() == [[[6, 2, 3, 0, 5, 1, 4, -1]]]


@pytest.mark.parametrize(("query_lens", "seq_lens"), RAGGED)
def test_msa_select(query_lens, seq_lens):
    case = paged_case(query_lens, seq_lens, PAGE)
    lane, keys = filled_index_lane(case, INDEX_DIM)
    index_q = randn(sum(query_lens), 2, INDEX_DIM)
    selection = msa_select_torch(index_q, lane, case.batch, 4, 0, 1)
    scores = reference_scores(index_q, keys, case.batch)
    for t, _, position in owners(case.batch):
        for head in range(2):
            assert selection[head, t].tolist() == reference_topk(scores[head, t].tolist(), position, PAGE, 4, 0, 1)


@pytest.mark.parametrize(("query_lens", "seq_lens"), RAGGED)
@pytest.mark.parametrize("num_chunk_bytes", [1, 1 << 30])
def test_sparse_attention(query_lens, seq_lens, num_chunk_bytes, monkeypatch):
    monkeypatch.setattr(sparse_module, "_CHUNK_BYTES", num_chunk_bytes)
    case = paged_case(query_lens, seq_lens, PAGE)
    lane, contents = filled_kv_lane(case, KV_HEADS, DIM)
    scores = randn(KV_HEADS, sum(query_lens), num_blocks(case.batch), seed=5)
    selection = block_topk_torch(scores, case.batch, 4, 0, 1)
    q = randn(sum(query_lens), HEADS, DIM)
    out = sparse_attention_torch(q, lane, selection, case.batch, SCALE)
    torch.testing.assert_close(
        out.double(), reference_attention(q, contents, case.batch, selected(selection)), atol=1e-5, rtol=1e-5
    )


def test_sparse_attention_takes_selections_in_any_order():
    case = paged_case([1, 50], [120, 90], PAGE)
    lane, _ = filled_kv_lane(case, KV_HEADS, DIM)
    selection = block_topk_torch(randn(KV_HEADS, 51, num_blocks(case.batch)), case.batch, 4, 0, 1)
    q = randn(51, HEADS, DIM)
    out = sparse_attention_torch(q, lane, selection, case.batch, SCALE)
    torch.testing.assert_close(
        out, sparse_attention_torch(q, lane, selection.flip(-1), case.batch, SCALE), atol=1e-6, rtol=1e-6
    )


def test_sparse_attention_without_the_own_block():
    case = paged_case([1], [100], PAGE)
    lane, contents = filled_kv_lane(case, KV_HEADS, DIM)
    selection = torch.tensor([[[2, 0, -1]], [[4, -1, -1]]], dtype=torch.int32)
    q = randn(1, HEADS, DIM)
    out = sparse_attention_torch(q, lane, selection, case.batch, SCALE)
    torch.testing.assert_close(
        out.double(), reference_attention(q, contents, case.batch, selected(selection)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("query_lens", "seq_lens"), RAGGED)
@pytest.mark.parametrize("num_queries", [7, 256])
def test_dense_attention(query_lens, seq_lens, num_queries, monkeypatch):
    monkeypatch.setattr("server.kernels.dense_attention._QUERIES_PER_CHUNK", num_queries)
    case = paged_case(query_lens, seq_lens, PAGE)
    lane, contents = filled_kv_lane(case, KV_HEADS, DIM)
    q = randn(sum(query_lens), HEADS, DIM)
    out = dense_attention(q, lane, case.batch, SCALE)
    expected = reference_attention(q, contents, case.batch, lambda kv_head, token: None)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_sparse_equals_dense_while_everything_is_selected():
    case = paged_case([1, 64], [64, 64], PAGE)
    lane, _ = filled_kv_lane(case, KV_HEADS, DIM)
    selection = block_topk_torch(randn(KV_HEADS, 65, num_blocks(case.batch)), case.batch, 4, 0, 1)
    q = randn(65, HEADS, DIM)
    sparse, dense = sparse_attention_torch(q, lane, selection, case.batch, SCALE), dense_attention(q, lane, case.batch, SCALE)
    torch.testing.assert_close(sparse, dense, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once_at_the_end(dtype):
    case = paged_case([1, 33], [50, 70], PAGE)
    lane, contents = filled_kv_lane(case, KV_HEADS, DIM, dtype=dtype)
    q = randn(34, HEADS, DIM, dtype=dtype)
    out = dense_attention(q, lane, case.batch, SCALE)
    expected = reference_attention(q, contents, case.batch, lambda kv_head, token: None)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), atol=1e-4, rtol=2 * torch.finfo(dtype).eps)
