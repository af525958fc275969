import math
from dataclasses import replace

import pytest
import torch

from server.kernels.block_topk import block_topk_torch
from server.kernels.block_topk_prefill import block_topk_prefill
from server.kernels.index_score import index_score_torch
from server.kernels.index_score_prefill import index_score_prefill
from server.kernels.msa_select_prefill import msa_select_prefill
from tests.kernels.prefill_reference import reference_scores, reference_topk
from tests.paged import filled_index_lane, paged_case

PAGE, DIM = 16, 16
RAGGED = [
    pytest.param([2], [2], id="two tokens"),
    pytest.param([4], [50], id="as many tokens as heads, starts inside a page"),
    pytest.param([15, 16, 17], [31, 47, 17], id="around page ends"),
    pytest.param([3, 2, 40], [260, 17, 40], id="ragged, one long"),
    pytest.param([33], [511], id="around 32 pages"),
]


def make(query_lens, seq_lens, num_heads=4, dtype=torch.float32, seed=0):
    case = paged_case(query_lens, seq_lens, PAGE, seed=seed)
    lane, keys = filled_index_lane(case, DIM, dtype=dtype, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed + 2)
    index_q = torch.randn((len(case.batch.positions), num_heads, DIM), generator=generator).to(dtype)
    return case.batch, index_q, lane, keys


def poisoned(shape, dtype=torch.float32):
    return torch.full(shape, torch.nan if dtype.is_floating_point else -99, dtype=dtype)


@pytest.mark.parametrize(("query_lens", "seq_lens"), RAGGED)
def test_scores_equal_the_float64_reference(query_lens, seq_lens):
    batch, index_q, lane, keys = make(query_lens, seq_lens)
    expected = reference_scores(index_q, keys, batch)
    out = index_score_prefill(index_q, lane, batch, poisoned(expected.shape))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, index_score_torch(index_q, lane, batch), rtol=1e-5, atol=1e-5)


def test_half_precision_scores_are_rounded_only_once():
    batch, index_q, lane, keys = make([37], [150], dtype=torch.float16)
    out = index_score_prefill(index_q, lane, batch, poisoned((4, 37, 10)))
    torch.testing.assert_close(out.double(), reference_scores(index_q, keys, batch), rtol=1e-5, atol=1e-4)


def test_scores_go_into_a_strided_view_and_nowhere_else():
    batch, index_q, lane, keys = make([5], [90])
    whole = poisoned((4, 9, 8))
    index_score_prefill(index_q, lane, batch, whole[:, 2:7, :6])
    torch.testing.assert_close(whole[:, 2:7, :6].double(), reference_scores(index_q, keys, batch), rtol=1e-5, atol=1e-5)
    assert whole[:, :2].isnan().all()
    assert whole[:, 7:].isnan().all()
    assert whole[..., 6:].isnan().all()


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_init", "num_local"),
    [([4], [50], 0, 1), ([9, 5, 17], [25, 47, 17], 0, 1), ([3, 2, 9], [260, 17, 40], 1, 2), ([5], [511], 0, 1)],
)
def test_selection_equals_the_reference_exactly(query_lens, seq_lens, num_init, num_local):
    batch, index_q, lane, keys = make(query_lens, seq_lens)
    out = poisoned((4, len(index_q), 4), torch.int32)
    msa_select_prefill(index_q, lane, batch, 4, num_init, num_local, out)
    expected = reference_topk(reference_scores(index_q, keys, batch), batch, 4, num_init, num_local)
    assert [[[b for b in row if b >= 0] for row in head] for head in out.tolist()] == expected


def random_scores(num_heads, batch, levels, seed=3):
    """Scores with many ties where `levels` is small; columns behind the own block hold NaN."""
    max_blocks = -(-batch.max_seq_len // batch.page_size)
    generator = torch.Generator().manual_seed(seed)
    shape = (num_heads, len(batch.positions), max_blocks)
    scores = torch.randint(-levels, levels, shape, generator=generator).float() / 7
    behind = torch.arange(max_blocks) > (batch.positions // batch.page_size)[:, None]
    return scores.masked_fill(behind, -math.inf)


@pytest.mark.parametrize("levels", [1, 1000], ids=["many ties", "few ties"])
@pytest.mark.parametrize("num_blocks", [3, 17, 100, 257, 1025])
def test_ties_go_to_the_lower_block(levels, num_blocks):
    batch = paged_case([2], [num_blocks * 2 - 1], 2).batch
    scores = random_scores(1, batch, levels)
    out = block_topk_prefill(scores, batch, 16, 0, 1, poisoned((1, 2, 16), torch.int32))
    expected = reference_topk(scores, batch, 16, 0, 1)
    assert [[[b for b in row if b >= 0] for row in head] for head in out.tolist()] == expected


def test_a_nan_score_ranks_last():
    batch = paged_case([1, 2], [80, 80], 4).batch.prefills
    scores = random_scores(1, batch, 1000)
    scores[0, :, 3] = torch.nan
    out = block_topk_prefill(scores, batch, 4, 0, 1, poisoned((1, 2, 4), torch.int32))
    twin = block_topk_torch(scores, batch, 4, 0, 1)
    assert out.tolist() == twin.tolist()
    assert 3 not in out[0, 0].tolist()


def test_up_to_8192_blocks():
    batch = paged_case([2], [8192 * 2], 2).batch
    scores = random_scores(1, batch, 10**6)
    out = block_topk_prefill(scores, batch, 16, 0, 1, poisoned((1, 2, 16), torch.int32))
    assert out.tolist() == reference_topk(scores, batch, 16, 0, 1)


def test_two_levels_agree_with_one_when_the_scorer_reports_group_maxima():
    batch, index_q, lane, keys = make([2], [16 * 270 - 3], num_heads=1)
    out = msa_select_prefill(index_q, lane, batch, 16, 0, 1, poisoned((1, 2, 16), torch.int32))
    expected = reference_topk(reference_scores(index_q, keys, batch), batch, 16, 0, 1)
    assert out.tolist() == expected


def test_pages_beyond_31_bits_of_elements():
    batch, index_q, lane, keys = make([2], [40], dtype=torch.float16)
    far = 2**31 // (PAGE * DIM)
    distant = torch.empty((far + len(lane), PAGE, DIM), dtype=torch.float16)  # only the pages in use become real memory
    distant[far:] = lane
    moved = replace(batch, page_table=batch.page_table + far)
    out = index_score_prefill(index_q, distant, moved, poisoned((4, 2, 3)))
    torch.testing.assert_close(out.double(), reference_scores(index_q, keys, batch), rtol=1e-5, atol=1e-4)
