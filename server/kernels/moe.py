"""Routed experts: the fp32 router, and the sum of the chosen experts' MLPs.

Routing: `s = sigmoid(W x)`, the experts are the top-k of `s + bias`, their weights `s / sum(s)` over the chosen ones; the bias
decides, but does not weigh.
"""

import torch
from torch import Tensor

from server.kernels.linear import linear_torch
from server.kernels.mxfp8 import Mxfp8Weight
from server.kernels.swiglu import swiglu_oai_torch


def route_torch(x: Tensor, router_weight: Tensor, correction_bias: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Twin of `route`."""
    scores = torch.sigmoid(x.float() @ router_weight.T)  # [T, E]
    order = (scores + correction_bias).sort(dim=-1, descending=True, stable=True).indices
    expert_ids = order[:, :topk]
    weights = scores.gather(1, expert_ids)
    return expert_ids.to(torch.int32), weights / weights.sum(-1, keepdim=True)


def moe_torch(
    x: Tensor,
    w13: Tensor | Mxfp8Weight,
    w2: Tensor | Mxfp8Weight,
    expert_ids: Tensor,
    weights: Tensor,
    alpha: float,
    beta: float,
    limit: float,
    scaling: float,
    has_shared: bool = False,
) -> Tensor:
    """Twin of `moe`: sorts (token, choice) pairs by expert and loops over the experts that were hit."""
    topk, num_experts = expert_ids.shape[1], w13.shape[0]
    weights = weights * scaling
    if has_shared:
        topk += 1
        expert_ids = torch.nn.functional.pad(expert_ids, (0, 1), value=num_experts - 1)
        weights = torch.nn.functional.pad(weights, (0, 1), value=1.0)
    flat_ids = expert_ids.flatten().long()
    order = flat_ids.argsort(stable=True)
    counts = torch.bincount(flat_ids, minlength=num_experts).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        pairs = order[begin : begin + count]
        begin += count
        tokens = pairs // topk
        gate, up = linear_torch(x[tokens], w13[expert]).chunk(2, dim=-1)
        hidden = linear_torch(swiglu_oai_torch(gate, up, alpha, beta, limit), w2[expert])
        out.index_add_(0, tokens, hidden.float() * weights.flatten()[pairs, None])
    return out.to(x.dtype)


def route(x: Tensor, router_weight: Tensor, correction_bias: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Choose experts; everything in fp32.

    Args:
        x: [T, H] in the model dtype.
        router_weight: [E, H] fp32.
        correction_bias: [E] fp32, added for the choice only.
        topk: experts per token.

    Returns:
        (expert ids [T, topk] int32 by descending choice score, ties to the lower id; weights [T, topk] fp32, rows sum to 1).
    """
    if x.is_cuda:
        from server.kernels.moe_router import route_triton

        return route_triton(x, router_weight, correction_bias, topk)
    return route_torch(x, router_weight, correction_bias, topk)


def moe(
    x: Tensor,
    w13: Tensor | Mxfp8Weight,
    w2: Tensor | Mxfp8Weight,
    expert_ids: Tensor,
    weights: Tensor,
    alpha: float,
    beta: float,
    limit: float,
    scaling: float,
    has_shared: bool = False,
) -> Tensor:
    """Weighted sum of the chosen experts.

    Args:
        x: [T, H].
        w13: [E, 2 * I, H], gate rows, then up rows; this and `w2` in the dtype of `x` or in MXFP8.
        w2: [E, H, I].
        expert_ids: [T, k] int32, all different within a row.
        weights: [T, k] fp32.
        alpha: of SwiGLU-OAI.
        beta: of SwiGLU-OAI.
        limit: of SwiGLU-OAI.
        scaling: config key `routed_scaling_factor`, times the whole sum.
        has_shared: the last expert of `w13` and `w2` is in no row of `expert_ids`; every token gets its result too, with weight
            1 and not scaled.

    Returns:
        [T, H] in the dtype of `x`; expert outputs are summed in fp32. Rows do not depend on other rows' values, as long as
        weights are finite: few tokens meet every chosen expert, if only with zeros.
    """
    if x.is_cuda:
        from server.kernels.moe_triton import moe_triton

        return moe_triton(x, w13, w2, expert_ids, weights, alpha, beta, limit, scaling, has_shared)
    return moe_torch(x, w13, w2, expert_ids, weights, alpha, beta, limit, scaling, has_shared)
