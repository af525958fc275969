import math
from dataclasses import replace

import pytest
import torch

from server.kernels.block_topk_decode import block_topk_decode
from server.kernels.index_score_decode import MAX_PROGRAMS, ScoreConfig, index_score_decode, score_config
from server.kernels.msa_select_decode import msa_select_decode
from server.kernels.topk_keys import TopkConfig
from tests.kernels.prefill_reference import reference_scores, reference_topk
from tests.paged import filled_index_lane, paged_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, DIM, HEADS = 16, 16, 4
RAGGED = [1, 15, 16, 17, 64, 65, 300]  # around page ends, around the size of a selection, and long


def make(seq_lens, dtype=torch.float32, seed=0, num_heads=HEADS):
    case = paged_case([1] * len(seq_lens), seq_lens, PAGE, seed=seed, device=DEVICE)
    lane, keys = filled_index_lane(case, DIM, dtype=dtype, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed + 2)
    index_q = torch.randn((len(seq_lens), num_heads, DIM), generator=generator).to(dtype).to(DEVICE)
    return case.batch, index_q, lane, keys


def poisoned_scores(batch, num_heads=HEADS):
    width = -(-batch.max_seq_len // PAGE)
    return torch.full((num_heads, len(batch.positions), width), torch.nan, device=DEVICE)


def selected(batch, topk, select, num_heads=HEADS):
    out = torch.full((num_heads, len(batch.positions), topk), -99, dtype=torch.int32, device=DEVICE)
    select(out)
    return [[[block for block in row if block >= 0] for row in head] for head in out.tolist()], out


@pytest.mark.parametrize(
    "config", [None, ScoreConfig(3, 2, 4), ScoreConfig(32, 1, 4)], ids=["default", "3 splits", "a page each"]
)
def test_scores_equal_the_float64_reference(config):
    batch, index_q, lane, keys = make(RAGGED)
    out = poisoned_scores(batch)
    index_score_decode(index_q, lane, batch, out, config)
    torch.testing.assert_close(out.double(), reference_scores(index_q, keys, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_sequences", [1, 8, 64, 128, 5000])
@pytest.mark.parametrize("max_blocks", [1, 64, 1024, 8192])
def test_the_grid_is_bounded_and_no_larger_than_the_blocks(num_sequences, max_blocks):
    num_splits = score_config(num_sequences, max_blocks).num_splits
    assert 1 <= num_splits <= max_blocks
    assert num_splits * num_sequences <= max(MAX_PROGRAMS, num_sequences)
    if num_sequences * max_blocks <= 1 << 17:  # below the bound, a program has at most 16 pages
        assert num_splits * 16 >= max_blocks


def test_half_precision_scores_are_rounded_only_once():
    batch, index_q, lane, keys = make([40, 90], dtype=torch.float16)
    out = poisoned_scores(batch)
    index_score_decode(index_q, lane, batch, out)
    torch.testing.assert_close(out.double(), reference_scores(index_q, keys, batch), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("num_heads", "batch_size"), [(1, 1), (3, 3), (4, 4)])
def test_any_number_of_index_heads(num_heads, batch_size):
    batch, index_q, lane, keys = make([33 + b for b in range(batch_size)], num_heads=num_heads)
    out = poisoned_scores(batch, num_heads)
    index_score_decode(index_q, lane, batch, out)
    torch.testing.assert_close(out.double(), reference_scores(index_q, keys, batch), rtol=1e-5, atol=1e-5)


def test_scores_go_into_a_strided_view_and_nowhere_else():
    batch, index_q, lane, keys = make([90, 20])
    whole = torch.full((HEADS, 4, 8), torch.nan, device=DEVICE)
    index_score_decode(index_q, lane, batch, whole[:, 1:3, :6])
    torch.testing.assert_close(whole[:, 1:3, :6].double(), reference_scores(index_q, keys, batch), rtol=1e-5, atol=1e-5)
    assert whole[:, [0, 3]].isnan().all()
    assert whole[..., 6:].isnan().all()


@pytest.mark.parametrize(("topk", "num_init", "num_local"), [(4, 0, 1), (4, 1, 2), (3, 0, 1)])
def test_selection_is_exact_and_ordered(topk, num_init, num_local):
    batch, index_q, lane, keys = make(RAGGED)
    expected = reference_topk(reference_scores(index_q, keys, batch), batch, topk, num_init, num_local)
    scores = poisoned_scores(batch)
    index_score_decode(index_q, lane, batch, scores)
    alone, raw = selected(batch, topk, lambda out: block_topk_decode(scores, batch, topk, num_init, num_local, out))
    assert alone == expected
    assert (raw[:, 0, 1:] == -1).all()  # a sequence of one block: the tail is marked
    together, _ = selected(batch, topk, lambda out: msa_select_decode(index_q, lane, batch, topk, num_init, num_local, out))
    assert together == expected


@pytest.mark.parametrize("num_blocks", [5, 64, 65, 257, 1030])
@pytest.mark.parametrize("distinct", [3, 1000], ids=["ties", "no ties"])
def test_long_rows_and_ties(num_blocks, distinct):
    batch, _, _, _ = make([num_blocks * PAGE - 3])
    generator = torch.Generator().manual_seed(num_blocks)
    scores = torch.randint(-distinct, distinct, (2, 1, num_blocks), generator=generator).float().to(DEVICE)
    scores[:, :, -1] = torch.nan  # the own block is forced: its score is not looked at
    expected = reference_topk(scores, batch, 4, 0, 1)
    config = TopkConfig(progressions=32, num_warps=1)
    for some in (None, config):
        result, _ = selected(batch, 4, lambda out, some=some: block_topk_decode(scores, batch, 4, 0, 1, out, some), num_heads=2)
        assert result == expected


def test_signed_zeros_tie_and_infinities_and_nan_rank():
    batch, _, _, _ = make([8 * PAGE])
    scores = torch.tensor([-0.0, 0.0, -math.inf, math.nan, 1.0, -1.0, 0.0, 9.0], device=DEVICE).view(1, 1, 8)
    result, _ = selected(batch, 7, lambda out: block_topk_decode(scores, batch, 7, 0, 1, out), num_heads=1)
    assert result == [[[7, 4, 0, 1, 6, 5, 2]]]


def test_few_blocks_are_all_selected_without_reading_keys():
    batch, index_q, lane, _ = make([4 * PAGE, 1, 2 * PAGE + 1])
    lane.fill_(torch.nan)
    result, _ = selected(batch, 4, lambda out: msa_select_decode(index_q, lane, batch, 4, 0, 1, out))
    assert result == [[[0, 1, 2, 3], [0], [0, 1, 2]]] * HEADS


def test_a_padding_sequence_of_no_tokens_selects_nothing():
    batch, index_q, lane, keys = make([70, 20])
    padded = replace(batch, seq_lens=torch.tensor([70, 0], dtype=torch.int32, device=DEVICE))
    result, _ = selected(batch, 4, lambda out: msa_select_decode(index_q, lane, padded, 4, 0, 1, out))
    expected = reference_topk(reference_scores(index_q, keys, batch), batch, 4, 0, 1)
    assert [head[0] for head in result] == [head[0] for head in expected]
    assert all(head[1] == [] for head in result)


def test_batch_mates_and_bounds_do_not_change_a_selection():
    batch, index_q, lane, _ = make([300, 17, 250])
    whole, _ = selected(batch, 4, lambda out: msa_select_decode(index_q, lane, batch, 4, 0, 1, out))
    lone = replace(
        batch,
        **{name: getattr(batch, name)[2:] for name in ("positions", "slot_mapping", "seq_lens", "page_table")},
        sequence_of_token=batch.sequence_of_token[:1],
        query_start=batch.query_start[:2],
        num_decodes=1,
        max_seq_len=batch.page_table.shape[1] * PAGE,
    )
    alone, _ = selected(lone, 4, lambda out: msa_select_decode(index_q[2:], lane, lone, 4, 0, 1, out))
    assert [head[0] for head in alone] == [head[2] for head in whole]


@pytest.mark.gpu
@pytest.mark.parametrize("seq_lens", [[131072, 1, 2048, 2049, 40000], [1 << 20], [8191] * 65], ids=["ragged", "1M", "65 x 8k"])
def test_true_sizes_agree_with_the_reference_up_to_near_ties(seq_lens):
    page, topk = 128, 16
    case = paged_case([1] * len(seq_lens), seq_lens, page, device=DEVICE)
    batch = case.batch
    lane = torch.randn((case.num_pages, page, 128), device=DEVICE).bfloat16()
    index_q = torch.randn((len(seq_lens), HEADS, 128), device=DEVICE).bfloat16()
    out = torch.full((HEADS, len(seq_lens), topk), -99, dtype=torch.int32, device=DEVICE)
    msa_select_decode(index_q, lane, batch, topk, 0, 1, out)
    for b, seq_len in enumerate(seq_lens):
        blocks = -(-seq_len // page)
        keys = lane[batch.page_table[b, :blocks].long()].flatten(0, 1)[:seq_len].double()
        padded = torch.nn.functional.pad(index_q[b].double() @ keys.T, (0, -seq_len % page), value=-math.inf)
        scores = padded.view(HEADS, blocks, page).amax(-1)
        scores[:, -1] = math.inf
        count = min(topk, blocks)
        best = scores.topk(count, dim=-1).values
        chosen = scores.gather(1, out[:, b, :count].long())
        assert (out[:, b, count:] == -1).all()
        assert all(len(set(row)) == count for row in out[:, b, :count].tolist())
        if blocks > topk:
            assert (chosen[:, 0] == math.inf).all()
            assert (best[:, 1:] - chosen[:, 1:]).abs().max() < 1e-4  # fp32 accumulation of 128 products of size 1


@pytest.mark.gpu
def test_addresses_beyond_two_to_the_31_elements():
    page, num_pages = 128, 150_000  # 2.46e9 elements
    lane = torch.empty((num_pages, page, 128), dtype=torch.bfloat16, device=DEVICE)
    case = paged_case([1], [64 * page], page, device=DEVICE)
    table = torch.arange(num_pages - 64, num_pages, dtype=torch.int32, device=DEVICE)[None]
    lane[table[0].long()] = torch.randn((64, page, 128), device=DEVICE).bfloat16()
    batch = replace(case.batch, page_table=table)
    index_q = torch.randn((1, HEADS, 128), device=DEVICE).bfloat16()
    out = torch.empty((HEADS, 1, 64), device=DEVICE)
    index_score_decode(index_q, lane, batch, out)
    expected = (index_q[0].double() @ lane[-64:].flatten(0, 1).double().T).view(HEADS, 64, page).amax(-1)
    torch.testing.assert_close(out[:, 0].double(), expected, rtol=1e-5, atol=1e-4)
