"""Routed experts on a Triton backend: which of the kernels serves how many tokens."""

from torch import Tensor

from server.kernels.moe_configs import few_configs, grouped_config
from server.kernels.moe_few import MAX_PAIRS, moe_few
from server.kernels.moe_grouped import grouped_down, grouped_gate_up
from server.kernels.moe_plan import combine_rows, plan_experts
from server.kernels.moe_tiles import Activation, Weight, stored


def moe_triton(
    x: Tensor,
    w13: Weight,
    w2: Weight,
    expert_ids: Tensor,
    weights: Tensor,
    alpha: float,
    beta: float,
    limit: float,
    scaling: float,
    has_shared: bool = False,
) -> Tensor:
    """As `moe`, without a host synchronisation and with launches that depend on shapes alone."""
    num_tokens, topk = expert_ids.shape
    if num_tokens == 0:
        return x.new_empty(x.shape)
    activation = Activation(alpha, beta, limit)
    is_mxfp8, width = stored(w2)[2], w2.shape[2]
    few = few_configs(num_tokens, width, is_mxfp8)
    if few and num_tokens * topk <= MAX_PAIRS:
        return moe_few(x, w13, w2, expert_ids, weights, activation, scaling, has_shared, *few)
    max_rows, config = grouped_config(num_tokens * topk / w2.shape[0], x.element_size())
    plan = plan_experts(expert_ids, w2.shape[0] - has_shared, has_shared, max_rows)
    act = grouped_gate_up(x, w13, weights, plan, activation, scaling, max_rows, config)
    return combine_rows(grouped_down(act, w2, plan, max_rows, config), plan, topk, has_shared)
