"""Routed experts on a Triton backend: which of the kernels serves how many tokens."""

import torch
from torch import Tensor

from server.kernels.device import is_hopper
from server.kernels.moe_configs import few_configs, few_mxfp8_tiles, grouped_config, hopper_configs
from server.kernels.moe_few import MAX_PAIRS, few_down, few_gate_up
from server.kernels.moe_grouped import grouped_down, grouped_gate_up
from server.kernels.moe_plan import plan_experts
from server.kernels.moe_rows import combine_rows, sort_rows
from server.kernels.moe_tiles import Activation, Weight, stored
from server.kernels.mxfp8 import Mxfp8Weight


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
    is_mxfp8, num_routed = stored(w2)[2], w2.shape[0] - has_shared
    rows_per_expert = num_tokens * topk / num_routed
    on_hopper = uses_hopper_products(x, w13, w2)
    is_few = num_tokens * topk <= MAX_PAIRS
    if on_hopper and isinstance(w13, Mxfp8Weight) and isinstance(w2, Mxfp8Weight):
        tiles = few_mxfp8_tiles(num_tokens, w2.shape[2])
        if tiles and is_few:
            from server.kernels.moe_few_mxfp8 import few_down_mxfp8, few_gate_up_mxfp8

            found = few_gate_up_mxfp8(x, w13, expert_ids, weights, activation, scaling, has_shared, tiles[0])
            return few_down_mxfp8(found, w2, tiles[1])
    elif is_few and (few := few_configs(num_tokens, w2.shape[2])):
        return few_down(few_gate_up(x, w13, expert_ids, weights, activation, scaling, has_shared, few[0]), w2, few[1])
    if on_hopper:
        from server.kernels.moe_hopper import grouped_hopper

        first, second = hopper_configs(rows_per_expert, is_mxfp8)
        plan, rows = sort_rows(
            x, expert_ids, weights, scaling, num_routed, has_shared, first.step_rows, first.sizes[-1], permute=is_mxfp8
        )
        act = grouped_hopper(rows, w13, plan, activation, first)
        return combine_rows(grouped_hopper(act, w2, plan, None, second), plan, topk, has_shared)
    block_m, config = grouped_config(rows_per_expert, x.element_size())
    plan = plan_experts(expert_ids, weights, scaling, num_routed, has_shared, block_m, block_m)
    act = grouped_gate_up(x, w13, plan, topk, activation, block_m, config)
    return combine_rows(grouped_down(act, w2, plan, block_m, config), plan, topk, has_shared)


def uses_hopper_products(x: Tensor, w13: Weight, w2: Weight) -> bool:
    """Whether the kernels of `moe_hopper` serve these tensors: bf16 activations, widths in multiples of 128."""
    fits = w13.shape[1] % 256 == 0 and w13.shape[2] % 128 == 0 and stored(w13)[2] == stored(w2)[2]
    return fits and x.dtype == torch.bfloat16 and is_hopper(x.device)
