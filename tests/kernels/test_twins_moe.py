"""The twins of router and experts against float64."""

import pytest
import torch

from server.kernels.moe import moe, route

NUM_EXPERTS, HIDDEN, WIDTH, TOPK = 8, 40, 24, 3


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_bias_decides_but_does_not_weigh():
    x, weight, bias = randn(63, HIDDEN), randn(NUM_EXPERTS, HIDDEN, seed=1) / HIDDEN**0.5, randn(NUM_EXPERTS, seed=2)
    expert_ids, weights = route(x, weight, bias, TOPK)
    scores = 1 / (1 + (-x.double() @ weight.double().T).exp())
    chosen = (scores + bias.double()).topk(TOPK, dim=-1).indices
    assert torch.equal(expert_ids.long(), chosen)
    assert (chosen != scores.topk(TOPK, dim=-1).indices).any(), "the bias changes choices"
    expected = scores.gather(1, chosen)
    torch.testing.assert_close(weights.double(), expected / expected.sum(-1, keepdim=True), atol=1e-6, rtol=1e-6)
    assert (expert_ids.dtype, weights.dtype) == (torch.int32, torch.float32)


def test_routing_ties_go_to_the_lower_expert():
    expert_ids, weights = route(randn(5, HIDDEN), torch.zeros(NUM_EXPERTS, HIDDEN), torch.zeros(NUM_EXPERTS), TOPK)
    assert expert_ids.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, TOPK), 1 / TOPK))


def test_routing_of_a_bf16_model_is_fp32():
    x = randn(200, HIDDEN, dtype=torch.bfloat16)
    weight, bias = randn(NUM_EXPERTS, HIDDEN, seed=1), torch.zeros(NUM_EXPERTS)
    assert torch.equal(route(x, weight, bias, TOPK)[1], route(x.float(), weight, bias, TOPK)[1])


@pytest.mark.parametrize("num_tokens", [1, 2, 63])
def test_moe(num_tokens):
    x = randn(num_tokens, HIDDEN)
    w13, w2 = randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, seed=1) / 3, randn(NUM_EXPERTS, HIDDEN, WIDTH, seed=2) / 3
    expert_ids = randn(num_tokens, NUM_EXPERTS - 1, seed=5).topk(TOPK).indices.to(torch.int32)
    weights = randn(num_tokens, TOPK, seed=3).softmax(-1)
    out = moe(x, w13, w2, expert_ids, weights, 1.702, 1.0, 7.0, 2.0)
    expected = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64)
    for t in range(num_tokens):
        for expert, weight in zip(expert_ids[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (w13[expert].double() @ x[t].double()).split(WIDTH)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            expected[t] += 2.0 * weight * (w2[expert].double() @ (gate / (1 + (-1.702 * gate).exp()) * (up + 1.0)))
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)


def test_moe_of_a_token_does_not_depend_on_its_neighbours():
    x = randn(17, HIDDEN, dtype=torch.bfloat16)
    w13, w2 = (
        randn(*shape, dtype=torch.bfloat16) / 3 for shape in ((NUM_EXPERTS, 2 * WIDTH, HIDDEN), (NUM_EXPERTS, HIDDEN, WIDTH))
    )
    expert_ids, weights = route(x, randn(NUM_EXPERTS, HIDDEN, seed=4), torch.zeros(NUM_EXPERTS), TOPK)
    together = moe(x, w13, w2, expert_ids, weights, 1.702, 1.0, 7.0, 2.0)
    alone = torch.cat(
        [moe(x[i : i + 1], w13, w2, expert_ids[i : i + 1], weights[i : i + 1], 1.702, 1.0, 7.0, 2.0) for i in range(17)]
    )
    assert together.dtype == torch.bfloat16
    torch.testing.assert_close(together, alone, atol=1e-2, rtol=1e-2)
