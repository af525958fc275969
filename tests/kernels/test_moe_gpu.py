"""The Hopper kernels of router and experts in bf16 and MXFP8, against float64."""

import pytest
import torch

from server.kernels import moe_triton as dispatch
from server.kernels.moe import moe, route
from server.kernels.moe_configs import few_mxfp8_tiles, hopper_configs
from tests.kernels.gpu_memory import poison_free_memory
from tests.kernels.moe_reference import ACTIVATION, expected_moe, expected_route, normal, random_mxfp8, routing

pytestmark = pytest.mark.gpu

NUM_EXPERTS, HIDDEN, WIDTH, TOPK, SCALING = 16, 768, 384, 4, 2.0
TOLERANCE = 6e-3  # two roundings to bf16 of every activation, one of the result


def weights_of(is_mxfp8, num_experts):
    shapes = (num_experts, 2 * WIDTH, HIDDEN), (num_experts, HIDDEN, WIDTH)
    if is_mxfp8:
        return tuple(random_mxfp8(*shape, seed=i, device="cuda") for i, shape in enumerate(shapes))
    return tuple((normal(*shape, seed=i) / shape[-1] ** 0.5).cuda().bfloat16() for i, shape in enumerate(shapes, start=1))


def relative_error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


@pytest.fixture(params=["few", "sorted"])
def path(request, monkeypatch):
    """Serve few tokens with and without sorting."""
    if request.param == "sorted":
        monkeypatch.setattr(dispatch, "few_configs", lambda *_: None)
        monkeypatch.setattr(dispatch, "few_mxfp8_tiles", lambda *_: None)


@pytest.mark.parametrize("is_mxfp8", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("kind", ["random", "one expert", "few experts"])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 16])
def test_few_tokens(path, is_mxfp8, has_shared, kind, num_tokens):
    check(is_mxfp8, has_shared, kind, num_tokens)


@pytest.mark.parametrize(("width", "num_tokens"), [(384, 1), (384, 2), (384, 4), (384, 8), (3072, 1), (3072, 8)])
def test_every_tile_of_few_tokens_in_mxfp8(monkeypatch, width, num_tokens):
    tiles = few_mxfp8_tiles(num_tokens, width)
    monkeypatch.setattr(dispatch, "few_mxfp8_tiles", lambda *_: tiles)
    check(True, True, "few experts", num_tokens)


@pytest.mark.parametrize("is_mxfp8", [False, True])
def test_a_token_does_not_see_its_neighbours(path, is_mxfp8):
    w13, w2 = weights_of(is_mxfp8, NUM_EXPERTS + 1)
    x = normal(5, HIDDEN).cuda().bfloat16()
    expert_ids, weights = (tensor.cuda() for tensor in routing("few experts", 5, NUM_EXPERTS, TOPK))
    poisoned = x.clone()
    poisoned[2] = torch.nan
    out, with_poison = (moe(rows, w13, w2, expert_ids, weights, *ACTIVATION, SCALING, True) for rows in (x, poisoned))
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], with_poison[others])
    assert with_poison[2].isnan().all()


@pytest.mark.parametrize("is_mxfp8", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("kind", ["random", "one expert", "few experts"])
@pytest.mark.parametrize("num_tokens", [17, 64, 130, 300, 1100])
def test_many_tokens(is_mxfp8, has_shared, kind, num_tokens):
    check(is_mxfp8, has_shared, kind, num_tokens)


def check(is_mxfp8, has_shared, kind, num_tokens):
    w13, w2 = weights_of(is_mxfp8, NUM_EXPERTS + has_shared)
    x = normal(num_tokens, HIDDEN).cuda().bfloat16()
    expert_ids, weights = (tensor.cuda() for tensor in routing(kind, num_tokens, NUM_EXPERTS, TOPK))
    expected = expected_moe(x, w13, w2, expert_ids, weights, SCALING, has_shared)
    poison_free_memory()
    out = moe(x, w13, w2, expert_ids, weights, *ACTIVATION, SCALING, has_shared)
    assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("is_mxfp8", [False, True])
@pytest.mark.parametrize("rows_per_expert", [4, 32, 96, 256])
def test_tiles_of_every_width(is_mxfp8, rows_per_expert, monkeypatch):
    configs = hopper_configs(rows_per_expert, is_mxfp8)
    monkeypatch.setattr(dispatch, "hopper_configs", lambda *_: configs)
    sizes = configs[0].sizes
    rows = [0, 1, *sizes, *(size - 1 for size in sizes), *(size + 1 for size in sizes), 3 * sizes[-1]]
    w13, w2 = weights_of(is_mxfp8, len(rows))
    order = torch.randperm(sum(rows), generator=torch.Generator().manual_seed(3))
    expert_ids = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(rows))[order, None].cuda()
    x, weights = normal(sum(rows), HIDDEN).cuda().bfloat16(), torch.ones((sum(rows), 1), device="cuda")
    expected = expected_moe(x, w13, w2, expert_ids, weights, SCALING)
    poison_free_memory()
    out = moe(x, w13, w2, expert_ids, weights, *ACTIVATION, SCALING)
    assert float(((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 2 * TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 500, 8192])
def test_router_at_full_width(num_tokens):
    x = normal(num_tokens, 6144).cuda().bfloat16()
    weight, bias = (normal(128, 6144, seed=1) / 78).cuda(), (normal(128, seed=2) / 10).cuda()
    poison_free_memory()
    expert_ids, weights = route(x, weight, bias, TOPK)
    chosen, expected = expected_route(x, weight, bias, TOPK)
    same = (expert_ids == chosen).all(-1)
    assert same.float().mean() > 0.999, "only choices within fp32 noise of each other may differ"
    torch.testing.assert_close(weights[same].double(), expected[same], atol=5e-6, rtol=0)


@pytest.mark.parametrize("is_mxfp8", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 40, 700])
def test_a_captured_graph_follows_a_new_routing(is_mxfp8, num_tokens):
    w13, w2 = weights_of(is_mxfp8, NUM_EXPERTS + 1)
    router, bias = (normal(NUM_EXPERTS, HIDDEN, seed=4) / HIDDEN**0.5).cuda(), torch.zeros(NUM_EXPERTS, device="cuda")
    x = normal(num_tokens, HIDDEN).cuda().bfloat16()

    def step():
        return moe(x, w13, w2, *route(x, router, bias, TOPK), *ACTIVATION, SCALING, True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        x.copy_(normal(num_tokens, HIDDEN, seed=seed))
        graph.replay()
        assert torch.equal(captured, step()), "replays and runs are equal bit for bit"


def test_experts_beyond_31_bits():
    hidden, width, num_experts = 6144, 3072, 64
    w13 = torch.zeros((num_experts, 2 * width, hidden), dtype=torch.bfloat16, device="cuda")
    w2 = torch.zeros((num_experts, hidden, width), dtype=torch.bfloat16, device="cuda")
    assert w13.numel() > 2**31
    w13[-2:].normal_(std=hidden**-0.5)
    w2[-2:].normal_(std=width**-0.5)
    for num_tokens in (2, 50):
        x = normal(num_tokens, hidden).cuda().bfloat16()
        expert_ids = torch.tensor([[num_experts - 1, num_experts - 2]], dtype=torch.int32, device="cuda").repeat(num_tokens, 1)
        weights = torch.full((num_tokens, 2), 0.5, device="cuda")
        expected = expected_moe(x, w13, w2, expert_ids, weights, SCALING)
        assert relative_error(moe(x, w13, w2, expert_ids, weights, *ACTIVATION, SCALING), expected) < TOLERANCE
