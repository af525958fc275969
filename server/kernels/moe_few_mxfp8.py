"""Experts of a few tokens (up to 8) with MXFP8 weights on Hopper: no sorting, as long as the touched experts take to read.

Two launches like those of `moe_few`, multiplied as `few_operands` says. In the first product eight gate rows and the eight up
rows that belong to them are one tile, so that SwiGLU-OAI finds both in one program; the weight of a choice goes into the
activation. The inner dimension of the second product is (expert, width), so its sum is the result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.integers import next_power_of_2
from server.kernels.launch import pdl_options
from server.kernels.moe_configs import FewTile
from server.kernels.moe_few_mxfp8_down import few_down_kernel
from server.kernels.moe_few_mxfp8_up import few_gate_up_kernel
from server.kernels.moe_tiles import Activation
from server.kernels.mxfp8 import Mxfp8Weight

MAX_TOKENS = 8


@dataclass(frozen=True)
class FewMxfp8Activations:
    """What the first product leaves to the second.

    Attributes:
        act: [slots, T, width]: activations times weights, only where a token chose the expert whose first slot it is.
        expert_ids: [T, k] int32: the choices.
        has_shared: whether the first slot is that of an expert which every token has.
        table: [slots] int64: room for the second product's list of experts.
    """

    act: Tensor
    expert_ids: Tensor
    has_shared: bool
    table: Tensor

    def constants(self) -> dict[str, int]:
        """Constants of both kernels, which do not depend on the number of tokens."""
        topk = self.expert_ids.shape[1]
        return {"TOPK": topk, "HAS_SHARED": int(self.has_shared), "MAX_PAIRS": next_power_of_2(MAX_TOKENS * topk)}


def few_gate_up_mxfp8(
    x: Tensor, w13: Mxfp8Weight, expert_ids: Tensor, weights: Tensor, activation: Activation, scaling: float, has_shared: bool,
    tile: FewTile,
) -> FewMxfp8Activations:  # fmt: skip
    """The first product of up to MAX_TOKENS tokens; rows of `x` begin on 16 bytes, both widths are multiples of 128."""
    num_tokens, topk = expert_ids.shape
    num_experts, width, hidden = w13.shape[0], w13.shape[1] // 2, w13.shape[2]
    num_slots = num_tokens * topk + has_shared
    found = FewMxfp8Activations(
        act=x.new_empty((num_slots, num_tokens, width)),
        expert_ids=expert_ids,
        has_shared=has_shared,
        table=torch.empty((num_slots,), dtype=torch.int64, device=x.device),
    )
    few_gate_up_kernel[(width // (4 * tile.octets), num_slots)](
        x.view(torch.int32), w13.values.view(torch.int32), w13.scales, expert_ids, weights, found.act, num_tokens,
        num_tokens * topk, num_experts - 1, activation.alpha, activation.beta, activation.limit, scaling, x.stride(0) // 2,
        H=hidden, WIDTH=width, **found.constants(), **tile.options(), **pdl_options(x.device),
    )  # fmt: skip
    return found


def few_down_mxfp8(found: FewMxfp8Activations, w2: Mxfp8Weight, tile: FewTile) -> Tensor:
    """The second product, summed over experts: [T, H]."""
    (num_tokens, topk), (num_experts, hidden, width) = found.expert_ids.shape, w2.shape
    out = found.act.new_empty((num_tokens, hidden))
    few_down_kernel[(hidden // (8 * tile.octets),)](
        found.act.view(torch.int32), w2.values.view(torch.int32), w2.scales, found.expert_ids, found.table, out, num_tokens,
        num_tokens * topk, num_experts - 1,
        H=hidden, WIDTH=width, S=tile.stages, **found.constants(), **tile.options(), **pdl_options(out.device),
    )  # fmt: skip
    return out
