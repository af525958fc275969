"""Float64 references of router and experts, and routings of several kinds."""

import torch

from server.kernels.mxfp8 import Mxfp8Weight, dequantize_torch

ALPHA, BETA, LIMIT = ACTIVATION = (1.702, 1.0, 7.0)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_mxfp8(*shape, seed=0, device="cpu"):
    """Values of all signs and sizes, scales around the inverse root of the inner dimension."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator) * 2).to(torch.float8_e4m3fn)
    middle = 126 - round(torch.log2(torch.tensor(float(shape[-1]))).item() / 2)
    scales = torch.randint(middle - 2, middle + 1, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
    return Mxfp8Weight(values.to(device), scales.to(device))


def routing(kind, num_tokens, num_experts, topk, seed=0):
    """Expert ids [T, topk] int32 and weights: uniformly random, the same experts for all tokens, or half of the experts."""
    scores = normal(num_tokens, num_experts, seed=seed + 7)
    if kind == "one expert":
        scores = scores[:1].expand(num_tokens, -1)
    elif kind == "few experts":
        scores = scores[:, : max(topk, num_experts // 2)]
    return scores.topk(topk).indices.to(torch.int32), normal(num_tokens, topk, seed=seed + 8).softmax(-1)


def expected_route(x, weight, bias, topk):
    """(ids, weights) in float64."""
    scores = torch.sigmoid(x.double() @ weight.double().T)
    chosen = (scores + bias.double()).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True)


def expected_moe(x, w13, w2, expert_ids, weights, scaling, has_shared=False):
    """[T, H] in float64, expert by expert."""

    def full(weight, expert):
        part = weight[expert]
        return (dequantize_torch(part, torch.float32) if isinstance(part, Mxfp8Weight) else part).double()

    def mlp(rows, expert):
        gate, up = (rows @ full(w13, expert).T).chunk(2, dim=-1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (gate * torch.sigmoid(ALPHA * gate) * (up + BETA)) @ full(w2, expert).T

    x = x.double()
    out = torch.zeros_like(x)
    for expert in sorted(set(expert_ids.flatten().tolist())):
        tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
        out[tokens] += scaling * weights[tokens, choices, None].double() * mlp(x[tokens], expert)
    return out + mlp(x, w13.shape[0] - 1) if has_shared else out
