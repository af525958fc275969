import math
from dataclasses import replace

import pytest
import torch

import server.kernels.sparse_decode
from server.kernels.dense_decode import DenseConfig, dense_decode
from server.kernels.msa_decode import msa_decode
from server.kernels.msa_select_decode import msa_select_decode
from server.kernels.selection_rule import SelectionRule
from server.kernels.sparse_decode import HostTier, SparseConfig, sparse_decode
from tests.kernels.prefill_reference import reference_attention, relative_error
from tests.paged import filled_index_lane, filled_kv_lane, paged_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, DIM, KV_HEADS, TOPK, SCALE = 16, 16, 2, 4, 0.3
RAGGED = [1, 16, 17, 64, 65, 200]


def make(seq_lens, group=2, dtype=torch.float32, seed=0):
    case = paged_case([1] * len(seq_lens), seq_lens, PAGE, seed=seed, device=DEVICE)
    lane, contents = filled_kv_lane(case, KV_HEADS, DIM, dtype=dtype, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed + 2)
    q = torch.randn((len(seq_lens), KV_HEADS * group, DIM), generator=generator).to(dtype).to(DEVICE)
    return case.batch, q, lane, contents


def random_selection(batch, topk=TOPK, num_kv_heads=KV_HEADS, seed=3):
    """Own block first, then random earlier ones, -1 at the tail; heads and sequences differ."""
    generator = torch.Generator().manual_seed(seed)
    selection = torch.full((num_kv_heads, len(batch.positions), topk), -1, dtype=torch.int32)
    for t, position in enumerate(batch.positions.tolist()):
        own = position // batch.page_size
        for h in range(num_kv_heads):
            blocks = [own, *torch.randperm(own, generator=generator).tolist()][:topk]
            selection[h, t, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return selection.to(DEVICE)


@pytest.mark.parametrize(
    "config",
    [None, SparseConfig(1, 1, 2, 4), SparseConfig(2, 2, 3, 4), SparseConfig(4, 1, 2, 4), SparseConfig(8, 2, 2, 4)],
    ids=["default", "one split", "half pages", "a page each", "half a page each"],
)
def test_sparse_equals_the_float64_reference(config):
    batch, q, lane, contents = make(RAGGED)
    selection = random_selection(batch)
    out = torch.full_like(q, torch.nan)
    sparse_decode(q, lane, selection, batch, SCALE, out, config=config)
    assert relative_error(out, reference_attention(q, contents, selection, batch, SCALE)) < 1e-6


def test_a_short_sequence_keeps_all_its_splits_busy(monkeypatch):
    taken = []
    monkeypatch.setattr(server.kernels.sparse_decode, "merge", lambda partials, *_: taken.append(partials.stats[:, :, 1]))
    batch, q, lane, _ = make([2 * PAGE])
    sparse_decode(q, lane, random_selection(batch), batch, SCALE, torch.empty_like(q), config=SparseConfig(2, 2, 3, 4))
    assert (taken[0] > 0).all()  # sums of the softmax, [units, splits, heads]


@pytest.mark.parametrize("group", [1, 3, 16])
def test_sparse_takes_any_query_group_and_strided_tensors(group):
    batch, q, lane, contents = make([70, 33, 16], group=group)
    selection = random_selection(batch)
    wide = torch.full((3, 2 * q.shape[1], DIM), torch.nan, device=DEVICE)
    wide[:, ::2] = q
    out = torch.full_like(wide, torch.nan)
    spread = torch.full((KV_HEADS, 5, TOPK), -77, dtype=torch.int32, device=DEVICE)
    spread[:, 1:4] = selection
    sparse_decode(wide[:, ::2], lane, spread[:, 1:4], batch, SCALE, out[:, 1::2])
    assert relative_error(out[:, 1::2], reference_attention(q, contents, selection, batch, SCALE)) < 1e-6
    assert out[:, ::2].isnan().all()


def test_sparse_in_half_precision():
    batch, q, lane, contents = make(RAGGED, dtype=torch.float16)
    selection = random_selection(batch)
    out = torch.full_like(q, torch.nan)
    sparse_decode(q, lane, selection, batch, SCALE, out)
    assert relative_error(out, reference_attention(q, contents, selection, batch, SCALE)) < 1e-3


def test_large_scores_do_not_overflow():
    batch, q, lane, contents = make([90])
    selection = random_selection(batch)
    out = torch.full_like(q, torch.nan)
    sparse_decode(q * 300, lane, selection, batch, SCALE, out)
    assert relative_error(out, reference_attention(q * 300, contents, selection, batch, SCALE)) < 1e-6


def test_a_padding_sequence_of_no_tokens_gives_zeros():
    batch, q, lane, contents = make([70, 20])
    selection = random_selection(batch)
    expected = reference_attention(q, contents, selection, batch, SCALE)
    selection[:, 1] = -1
    padded = replace(batch, seq_lens=torch.tensor([70, 0], dtype=torch.int32, device=DEVICE))
    for run in (
        lambda out: sparse_decode(q, lane, selection, padded, SCALE, out),
        lambda out: sparse_decode(q, lane, selection, padded, SCALE, out, config=SparseConfig(1, 1, 2, 4)),
        lambda out: dense_decode(q, lane, padded, SCALE, out),
    ):
        out = torch.full_like(q, torch.nan)
        run(out)
        assert (out[1] == 0).all()
        assert out[0].isfinite().all()
    out = torch.full_like(q, torch.nan)
    sparse_decode(q, lane, selection, padded, SCALE, out)
    assert relative_error(out[0], expected[0]) < 1e-6


def split_over_tiers(lane, on_host):
    """The lane cut into a smaller GPU lane and a host lane; pages of `on_host` [P] bool are only in the latter."""
    slot_of_page = torch.where(on_host, -on_host.int().cumsum(0), (~on_host).int().cumsum(0) - 1).to(torch.int32)
    host = lane[on_host].cpu()
    gpu = lane[~on_host]
    return (gpu if len(gpu) else torch.full_like(lane[:1], torch.nan)), HostTier(
        host.pin_memory() if DEVICE == "cuda" else host, slot_of_page.to(DEVICE)
    )


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("config", [None, SparseConfig(1, 2, 3, 4)], ids=["split", "one split"])
def test_pages_in_host_memory_give_the_same_bits(fraction, config):
    batch, q, lane, _ = make([200, 90, 16])
    selection = random_selection(batch)
    expected = torch.full_like(q, torch.nan)
    sparse_decode(q, lane, selection, batch, SCALE, expected, config=config)
    on_host = torch.rand(lane.shape[0], generator=torch.Generator().manual_seed(5)) < fraction
    gpu_lane, tier = split_over_tiers(lane, on_host.to(DEVICE))
    out = torch.full_like(q, torch.nan)
    sparse_decode(q, gpu_lane, selection, batch, SCALE, out, host_tier=tier, config=config)
    assert torch.equal(out, expected)


def test_a_host_lane_of_another_layout_is_refused():
    batch, q, lane, _ = make([40])
    tier = HostTier(lane.cpu().transpose(1, 2), torch.zeros(lane.shape[0], dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="strides"):
        sparse_decode(q, lane, random_selection(batch), batch, SCALE, torch.empty_like(q), host_tier=tier)


@pytest.mark.parametrize("rule", [SelectionRule(4, 0, 1), SelectionRule(3, 1, 1)], ids=["released", "an initial block too"])
def test_selecting_inside_the_attention_gives_what_the_two_ops_give(rule):
    case = paged_case([1] * len(RAGGED), RAGGED, PAGE, device=DEVICE)
    batch, q, lane, contents = make(RAGGED)
    index_lane, _ = filled_index_lane(case, DIM)
    index_q = torch.randn((len(RAGGED), KV_HEADS, DIM), generator=torch.Generator().manual_seed(9)).to(DEVICE)
    selection = torch.empty((KV_HEADS, len(RAGGED), rule.topk), dtype=torch.int32, device=DEVICE)
    msa_select_decode(index_q, index_lane, batch, rule.topk, rule.num_init_blocks, rule.num_local_blocks, selection)
    out = torch.full_like(q, torch.nan)
    msa_decode(q, index_q, lane, index_lane, batch, rule, SCALE, out)
    assert relative_error(out, reference_attention(q, contents, selection, batch, SCALE)) < 1e-6


@pytest.mark.parametrize("config", [None, DenseConfig(1, 1, 2, 4), DenseConfig(3, 2, 3, 4)], ids=["default", "one", "three"])
def test_dense_equals_the_float64_reference(config):
    batch, q, lane, contents = make(RAGGED)
    out = torch.full_like(q, torch.nan)
    dense_decode(q, lane, batch, SCALE, out, config)
    assert relative_error(out, reference_attention(q, contents, None, batch, SCALE)) < 1e-6


def test_batch_mates_do_not_change_a_sequence():
    batch, q, lane, _ = make([200, 33])
    selection = random_selection(batch)
    whole = torch.empty_like(q)
    sparse_decode(q, lane, selection, batch, SCALE, whole, config=SparseConfig(2, 1, 2, 4))
    lone = replace(
        batch,
        **{
            name: getattr(batch, name)[:1]
            for name in ("positions", "slot_mapping", "seq_lens", "page_table", "sequence_of_token")
        },
        query_start=batch.query_start[:2],
        num_decodes=1,
    )
    alone = torch.empty_like(q[:1])
    sparse_decode(q[:1], lane, selection[:, :1], lone, SCALE, alone, config=SparseConfig(2, 1, 2, 4))
    assert torch.equal(alone, whole[:1])


def true_size(seq_lens):
    case = paged_case([1] * len(seq_lens), seq_lens, 128, device=DEVICE)
    lane = torch.randn((case.num_pages, 4, 2, 128, 128), device=DEVICE).bfloat16()
    contents = []
    for b, seq_len in enumerate(seq_lens):
        pages = case.batch.page_table[b, : -(-seq_len // 128)].long()
        if seq_len % 128:
            lane[pages[-1], :, :, seq_len % 128 :] = torch.nan
        contents.append(lane[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len])
    q = torch.randn((len(seq_lens), 64, 128), device=DEVICE).bfloat16()
    return case.batch, q, lane, contents


@pytest.mark.gpu
@pytest.mark.parametrize("seq_lens", [[40000, 1, 2048, 2049, 127], [8191] * 33, [5000] * 2, [3000] * 65])
def test_true_sizes_in_bfloat16(seq_lens):
    batch, q, lane, contents = true_size(seq_lens)
    selection = random_selection(batch, 16, 4)
    out = torch.full_like(q, torch.nan)
    scale = 1 / math.sqrt(128)
    sparse_decode(q, lane, selection, batch, scale, out)
    assert relative_error(out, reference_attention(q, contents, selection, batch, scale)) < 5e-3
    out.fill_(torch.nan)
    dense_decode(q, lane, batch, scale, out)
    assert relative_error(out, reference_attention(q, contents, None, batch, scale)) < 5e-3


@pytest.mark.gpu
def test_a_million_tokens_and_repeated_replays_of_a_graph():
    batch, q, lane, contents = true_size([1 << 20, 300])
    out = torch.empty_like(q)
    selection = random_selection(batch, 16, 4)
    scale = 1 / math.sqrt(128)

    def step():
        dense_decode(q, lane, batch, scale, out)
        dense = out.clone()
        sparse_decode(q, lane, selection, batch, scale, out)
        return dense

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense = step()
    results = []
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        results.append((dense.clone(), out.clone()))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))
    assert relative_error(results[0][0], reference_attention(q, contents, None, batch, scale)) < 5e-3
    assert relative_error(results[0][1], reference_attention(q, contents, selection, batch, scale)) < 5e-3
