"""The kernels of router and experts against float64; bf16 and true widths are in `test_moe_gpu`."""

import pytest
import torch

from server.kernels import moe_rows
from server.kernels import moe_triton as dispatch
from server.kernels.moe_configs import TileConfig
from server.kernels.moe_plan import plan_experts
from server.kernels.moe_router import RouterConfig, partial_logits, route_triton
from server.kernels.moe_rows import sort_rows
from server.kernels.moe_triton import moe_triton
from server.kernels.mxfp8 import Mxfp8Weight
from tests.kernels.moe_reference import ACTIVATION, expected_moe, expected_route, normal, random_mxfp8, routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}


def relative_error(out, expected):
    return float((out.double().cpu() - expected.cpu()).norm() / expected.cpu().norm())


@pytest.fixture(params=["few", "grouped"])
def path(request, monkeypatch):
    """Serve every number of tokens by one of the two kinds of kernels, in small tiles."""
    small = TileConfig(16, 32, 4, 2)
    monkeypatch.setattr(dispatch, "few_configs", lambda *_: (small, small) if request.param == "few" else None)
    monkeypatch.setattr(dispatch, "grouped_config", lambda *_: (16, small))
    return request.param


def case(num_tokens, num_experts, hidden, width, dtype=torch.float32, seed=0):
    x = normal(num_tokens, hidden, seed=seed).to(DEVICE, dtype)
    w13 = (normal(num_experts, 2 * width, hidden, seed=seed + 1) / hidden**0.5).to(DEVICE, dtype)
    w2 = (normal(num_experts, hidden, width, seed=seed + 2) / width**0.5).to(DEVICE, dtype)
    return x, w13, w2


@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), [(1, 8, 4), (3, 4, 1), (17, 7, 3), (130, 8, 2)])
def test_router(num_tokens, num_experts, topk):
    x = normal(num_tokens, 100).to(DEVICE)
    weight, bias = (normal(num_experts, 100, seed=1) / 10).to(DEVICE), (normal(num_experts, seed=2) / 4).to(DEVICE)
    expert_ids, weights = route_triton(x, weight, bias, topk)
    chosen, expected = expected_route(x, weight, bias, topk)
    assert torch.equal(expert_ids.long().cpu(), chosen.cpu())
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("config", [RouterConfig(16, 16, 32, 2), RouterConfig(32, 16, 32, 1), RouterConfig(2, 4, 64)])
def test_partial_logits_add_up_to_the_product(config):
    x, weight = normal(37, 120).bfloat16().float().to(DEVICE), normal(20, 120, seed=1).to(DEVICE)
    partial = partial_logits(x, weight, config)
    assert partial.shape == (-(-120 // (config.block_k * max(1, config.num_steps))), 37, 20)
    assert relative_error(partial.sum(0), x.double() @ weight.double().T) < 1e-6


def test_router_ties_go_to_the_lower_expert():
    expert_ids, weights = route_triton(
        normal(5, 64).to(DEVICE), torch.zeros(6, 64, device=DEVICE), torch.zeros(6, device=DEVICE), 3
    )
    assert expert_ids.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, 3), 1 / 3, device=DEVICE))


def test_a_token_of_nan_chooses_experts_that_exist():
    x = normal(3, 64).to(DEVICE)
    x[1] = torch.nan
    expert_ids, _ = route_triton(x, normal(6, 64, seed=1).to(DEVICE), torch.zeros(6, device=DEVICE), 3)
    assert sorted(set(expert_ids[1].tolist())) == sorted(expert_ids[1].tolist())
    assert ((expert_ids >= 0) & (expert_ids < 6)).all()


@pytest.mark.parametrize("kind", ["random", "one expert", "few experts"])
@pytest.mark.parametrize(("num_tokens", "topk", "has_shared"), [(1, 4, False), (3, 1, True), (7, 3, True), (16, 2, False)])
def test_experts(path, kind, num_tokens, topk, has_shared):
    num_experts = 6
    x, w13, w2 = case(num_tokens, num_experts + has_shared, 72, 40)
    expert_ids, weights = (tensor.to(DEVICE) for tensor in routing(kind, num_tokens, num_experts, topk))
    out = moe_triton(x, w13, w2, expert_ids, weights, *ACTIVATION, 2.0, has_shared)
    assert relative_error(out, expected_moe(x, w13, w2, expert_ids, weights, 2.0, has_shared)) < TOLERANCE[x.dtype]


@pytest.mark.parametrize("has_shared", [False, True])
def test_many_tokens_in_half_precision(has_shared):
    x, w13, w2 = case(130, 5 + has_shared, 96, 64, torch.float16)
    expert_ids, weights = (tensor.to(DEVICE) for tensor in routing("random", 130, 5, 3))
    out = moe_triton(x, w13, w2, expert_ids, weights, *ACTIVATION, 2.0, has_shared)
    assert relative_error(out, expected_moe(x, w13, w2, expert_ids, weights, 2.0, has_shared)) < TOLERANCE[x.dtype]


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_mxfp8_weights_stay_as_they_are_stored(path, num_tokens):
    w13, w2 = random_mxfp8(6, 2 * 64, 96, device=DEVICE), random_mxfp8(6, 96, 64, seed=1, device=DEVICE)
    x = normal(num_tokens, 96).to(DEVICE)
    expert_ids, weights = (tensor.to(DEVICE) for tensor in routing("random", num_tokens, 5, 2))
    out = moe_triton(x, w13, w2, expert_ids, weights, *ACTIVATION, 1.5, True)
    assert isinstance(w13, Mxfp8Weight)
    assert relative_error(out, expected_moe(x, w13, w2, expert_ids, weights, 1.5, True)) < TOLERANCE[x.dtype]


def test_a_token_does_not_see_its_neighbours(path):
    x, w13, w2 = case(5, 4, 64, 32)
    expert_ids, weights = (tensor.to(DEVICE) for tensor in routing("random", 5, 4, 2))
    poisoned = x.clone()
    poisoned[2] = torch.nan
    out = moe_triton(x, w13, w2, expert_ids, weights, *ACTIVATION, 2.0)
    with_poison = moe_triton(poisoned, w13, w2, expert_ids, weights, *ACTIVATION, 2.0)
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], with_poison[others])
    assert with_poison[2].isnan().all()


def test_no_tokens():
    x, w13, w2 = case(0, 4, 64, 32)
    nothing = torch.empty((0, 2), device=DEVICE)
    assert moe_triton(x, w13, w2, nothing.int(), nothing, *ACTIVATION, 2.0).shape == (0, 64)
    assert route_triton(x, torch.zeros(4, 64, device=DEVICE), torch.zeros(4, device=DEVICE), 2)[0].shape == (0, 2)


def check_plan(plan, expert_ids, weights, num_experts, has_shared, max_rows):
    """Rows in the order of (expert, token), and every row in one tile of its expert; returns the pair of each row."""
    num_tokens = len(expert_ids) if has_shared else 0
    flat = torch.cat([expert_ids.flatten(), torch.full((num_tokens,), num_experts)])
    order = flat.argsort(stable=True)
    assert torch.equal(plan.pair_of_row.cpu().long(), order)
    assert torch.equal(plan.row_of_pair.cpu().long(), order.argsort()[: expert_ids.numel()])
    expected = torch.cat([weights.flatten() * 2.0, torch.ones(num_tokens)])
    assert torch.equal(plan.row_weights.cpu(), expected[order])
    tiles = plan.tiles[: int(plan.num_tiles)].tolist()
    assert len(tiles) <= plan.max_tiles
    covered = []
    for expert, first, rows, _ in tiles:
        assert 0 < rows <= max_rows
        assert set(flat[order[first : first + rows]].tolist()) == {expert}
        covered += range(first, first + rows)
    assert covered == list(range(plan.num_rows))
    return order


@pytest.mark.parametrize("kind", ["random", "one expert", "few experts"])
@pytest.mark.parametrize(("num_tokens", "has_shared"), [(1, True), (33, False), (130, True)])
def test_plan_covers_every_row_once_in_tiles_of_one_expert(kind, num_tokens, has_shared):
    num_experts, topk = 7, 2
    expert_ids, weights = routing(kind, num_tokens, num_experts, topk)
    plan = plan_experts(expert_ids.to(DEVICE), weights.to(DEVICE), 2.0, num_experts, has_shared, 16, 24)
    check_plan(plan, expert_ids, weights, num_experts, has_shared, 24)


@pytest.mark.parametrize("max_at_once", [0, 1024])
@pytest.mark.parametrize("kind", ["random", "one expert", "few experts"])
@pytest.mark.parametrize(
    ("num_tokens", "topk", "has_shared", "permute"),
    [(1, 4, True, False), (5, 3, False, True), (33, 1, True, True), (90, 3, True, False)],
)
def test_rows_are_sorted_in_one_launch_as_in_two(monkeypatch, max_at_once, kind, num_tokens, topk, has_shared, permute):
    monkeypatch.setattr(moe_rows, "_MAX_PAIRS_AT_ONCE", max_at_once)
    num_experts, hidden = 7, 384
    expert_ids, weights = routing(kind, num_tokens, num_experts, topk)
    x = normal(num_tokens, hidden + 8)[:, :hidden]
    plan, rows = sort_rows(
        x.to(DEVICE), expert_ids.to(DEVICE), weights.to(DEVICE), 2.0, num_experts, has_shared, 16, 24, permute
    )
    pair = check_plan(plan, expert_ids, weights, num_experts, has_shared, 24)
    token = torch.where(pair < num_tokens * topk, pair // topk, pair - num_tokens * topk)
    columns = torch.arange(hidden)
    if permute:  # bits of a column within 128, high to low: c1 c0 h s1 s0 j1 j0; stored as h s1 s0 j0 c1 c0 j1
        columns = columns.view(-1, 4, 2, 4, 2, 2).permute(0, 2, 3, 5, 1, 4).flatten()
    assert torch.equal(rows.cpu(), x[token][:, columns])
