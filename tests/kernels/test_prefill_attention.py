from dataclasses import replace

import pytest
import torch

from server.kernels.dense_attention import dense_attention_torch
from server.kernels.dense_prefill import dense_prefill
from server.kernels.sparse_attention import sparse_attention_torch
from server.kernels.sparse_plan import build_plan
from server.kernels.sparse_prefill import sparse_prefill
from tests.kernels.prefill_reference import reference_attention, relative_error
from tests.paged import filled_kv_lane, paged_case

PAGE, DIM = 16, 16
BATCHES = [
    pytest.param([2], [2], id="two tokens"),
    pytest.param([4], [50], id="as many tokens as heads, starts inside a page"),
    pytest.param([15, 16, 17], [31, 47, 17], id="around page ends"),
    pytest.param([3, 2, 21], [260, 17, 21], id="ragged, one long"),
]


def make(query_lens, seq_lens, num_heads=4, num_kv_heads=2, dtype=torch.float32, page=PAGE):
    case = paged_case(query_lens, seq_lens, page)
    lane, contents = filled_kv_lane(case, num_kv_heads, DIM, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn((len(case.batch.positions), num_heads, DIM), generator=generator).to(dtype)
    return case.batch, q, lane, contents


def random_selection(batch, num_kv_heads, topk, agreement, seed=6):
    """The own block and random earlier ones in random order; neighbours share a choice with probability `agreement`."""
    generator = torch.Generator().manual_seed(seed)
    selection = torch.full((num_kv_heads, len(batch.positions), topk), -1, dtype=torch.int32)
    for h in range(num_kv_heads):
        order = None
        for t, position in enumerate(batch.positions.tolist()):
            own = position // batch.page_size
            if order is None or len(order) != own or torch.rand((), generator=generator) > agreement:
                order = torch.randperm(own, generator=generator)
            chosen = torch.cat([torch.tensor([own]), order[: topk - 1]])
            chosen = chosen[torch.randperm(len(chosen), generator=generator)]
            selection[h, t, : len(chosen)] = chosen.int()
    return selection


@pytest.fixture
def page_major_from_the_first_token(monkeypatch):
    monkeypatch.setattr("server.kernels.sparse_prefill._MIN_TOKENS_FOR_PAGE_MAJOR", 1)


@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
@pytest.mark.parametrize("agreement", [0.5])
def test_tile_major_alone_equals_the_reference(query_lens, seq_lens, agreement):
    batch, q, lane, contents = make(query_lens, seq_lens)
    selection = random_selection(batch, 2, 4, agreement)
    out = sparse_prefill(q, lane, selection, batch, 0.3, torch.full_like(q, torch.nan))
    assert relative_error(out, reference_attention(q, contents, selection, batch, 0.3)) < 1e-5
    torch.testing.assert_close(out, sparse_attention_torch(q, lane, selection, batch, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("page_major_from_the_first_token")
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
@pytest.mark.parametrize("agreement", [0.0, 0.6])
def test_with_page_major_leftovers_it_equals_the_reference(query_lens, seq_lens, agreement):
    batch, q, lane, contents = make(query_lens, seq_lens)
    selection = random_selection(batch, 2, 4, agreement)
    out = sparse_prefill(q, lane, selection, batch, 0.3, torch.full_like(q, torch.nan))
    assert relative_error(out, reference_attention(q, contents, selection, batch, 0.3)) < 1e-5


@pytest.mark.usefixtures("page_major_from_the_first_token")
def test_half_precision_stays_within_its_rounding():
    batch, q, lane, contents = make([40], [200], dtype=torch.float16)
    selection = random_selection(batch, 2, 8, 0.7)
    out = sparse_prefill(q, lane, selection, batch, 0.3, torch.full_like(q, torch.nan))
    assert relative_error(out, reference_attention(q, contents, selection, batch, 0.3)) < 2e-3


@pytest.mark.usefixtures("page_major_from_the_first_token")
def test_it_is_deterministic_and_needs_no_clean_output():
    batch, q, lane, _ = make([20], [130])
    selection = random_selection(batch, 2, 4, 0.5)
    first = sparse_prefill(q, lane, selection, batch, 0.3, torch.full_like(q, torch.nan))
    second = sparse_prefill(q, lane, selection.flip(-1), batch, 0.3, torch.full_like(q, 7.0))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    assert torch.equal(first, sparse_prefill(q, lane, selection, batch, 0.3, torch.zeros_like(q)))


@pytest.mark.parametrize("min_members", [1, 2, 4])
@pytest.mark.parametrize("agreement", [0.0, 0.8])
def test_the_plan_serves_every_choice_exactly_once(min_members, agreement):
    batch = paged_case([3, 2, 45], [260, 17, 145], PAGE).batch
    num_pages = int(batch.page_table.max()) + 1
    selection = random_selection(batch, 2, 6, agreement)
    plan = build_plan(selection, batch, num_pages, 8, min_members)
    served = sorted(listed_choices(plan, batch) + leftover_choices(plan, selection, num_pages))
    wanted = []
    for h, t, k in torch.nonzero(selection >= 0).tolist():
        block, position = int(selection[h, t, k]), int(batch.positions[t])
        if block != position // PAGE:
            wanted.append((h, t, int(batch.page_table[batch.sequence_of_token[t], block])))
    assert served == sorted(wanted)


def tile_tokens(batch, tile):
    """Token numbers of every tile, None where a tile reaches out of its chunk."""
    tiles = []
    for b in range(len(batch.seq_lens)):
        end = int(batch.seq_lens[b])
        begin = end - int(batch.query_start[b + 1] - batch.query_start[b])
        for first in range(begin // tile * tile, end, tile):
            tokens = [int(batch.query_start[b]) + p - begin if begin <= p < end else None for p in range(first, first + tile)]
            tiles.append(tokens)
    return tiles


def listed_choices(plan, batch):
    choices = []
    for i, tokens in enumerate(tile_tokens(batch, plan.tile)):
        for h in range(plan.records.shape[1]):
            for j in range(int(plan.records[i, h, 5])):
                members = int(plan.list_members[i, h, j])
                page = int(plan.list_pages[i, h, j])
                choices += [(h, t, page) for q, t in enumerate(tokens) if members >> q & 1]
    return choices


def leftover_choices(plan, selection, num_pages):
    choices = []
    for unit in range(int(plan.totals[1]) if plan.max_leftovers else 0):
        h, page = divmod(int(plan.unit_page[unit]), num_pages)
        begin = int(plan.unit_begin[unit])
        for number in plan.leftovers[begin : begin + int(plan.unit_len[unit])].tolist():
            row, r = divmod(number, plan.max_leftovers)
            assert row // selection.shape[1] == h
            assert r < int(plan.num_leftovers.flatten()[row])
            choices.append((h, row % selection.shape[1], page))
    return choices


@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
def test_dense_attention_equals_the_reference(query_lens, seq_lens):
    batch, q, lane, contents = make(query_lens, seq_lens)
    out = dense_prefill(q, lane, batch, 0.3, torch.full_like(q, torch.nan))
    assert relative_error(out, reference_attention(q, contents, None, batch, 0.3)) < 1e-5
    torch.testing.assert_close(out, dense_attention_torch(q, lane, batch, 0.3), rtol=1e-4, atol=1e-5)


def test_selecting_every_block_equals_dense_attention():
    batch, q, lane, _ = make([30], [64])
    selection = torch.arange(4, dtype=torch.int32).expand(2, 30, 4)
    selection = torch.where(selection <= (batch.positions // PAGE)[:, None], selection, -1)
    sparse = sparse_prefill(q, lane, selection, batch, 0.3, torch.full_like(q, torch.nan))
    dense = dense_prefill(q, lane, batch, 0.3, torch.full_like(q, torch.nan))
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-6)


def test_strided_queries_and_outputs():
    batch, q, lane, contents = make([9], [60])
    packed = torch.full((9, 3, 4, DIM), torch.nan)
    packed[:, 1] = q
    out = torch.full((9, 2, 4, DIM), torch.nan)
    dense_prefill(packed[:, 1], lane, batch, 0.3, out[:, 1])
    assert relative_error(out[:, 1], reference_attention(q, contents, None, batch, 0.3)) < 1e-5
    assert out[:, 0].isnan().all()


def test_pages_beyond_31_bits_of_elements():
    batch, q, lane, contents = make([2], [90], dtype=torch.float16)
    far = 2**31 // lane[0].numel()
    distant = torch.empty((far + len(lane), *lane.shape[1:]), dtype=torch.float16)  # only pages in use become real memory
    distant[far:] = lane
    moved = replace(batch, page_table=batch.page_table + far)
    selection = random_selection(batch, 2, 4, 0.0)
    out = sparse_prefill(q, distant, selection, moved, 0.3, torch.full_like(q, torch.nan))
    assert relative_error(out, reference_attention(q, contents, selection, batch, 0.3)) < 2e-3
    out = dense_prefill(q, distant, moved, 0.3, torch.full_like(q, torch.nan))
    assert relative_error(out, reference_attention(q, contents, None, batch, 0.3)) < 2e-3
