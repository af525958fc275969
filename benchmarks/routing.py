"""How many distinct experts a step really touches, read off the sums that the layers hand to the collective."""

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.slices import Layers, Slice
from benchmarks.step_cases import StepCase
from server.kernels.moe import route
from server.kernels.norm import add_rms_norm
from server.kvcache.pools import CachePools
from server.model.shard import Alone


class Recorder(Alone):
    """A collective that keeps what it was given: attention and MLP of every layer in turn."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Of `x` itself."""
        self.sums.append(x)
        return super().add_rms_norm(x, residual, weight, eps)


@torch.inference_mode()
def distinct_experts(whole: Slice, layers: Layers, case: StepCase, pools: CachePools) -> float:
    """Mean number of experts that `case` touches in the MoE layers of a part of the slice; writes the cache."""
    config, weights = whole.part(layers)
    recorder = Recorder()
    whole.joined(layers, recorder).forward(case.token_ids, case.batch, pools)
    residual = weights["embed"][case.token_ids]
    counts = []
    for layer, is_moe in enumerate(config.text.layer_is_moe):
        attended, mlp = recorder.sums[2 * layer : 2 * layer + 2]
        normed, residual = add_rms_norm(attended, residual, weights[f"layers.{layer}.post_norm"], config.text.rms_norm_eps)
        if is_moe:
            counts.append(_num_chosen(normed, weights, layer, config.text.num_experts_per_token))
        residual = residual + mlp
    return sum(counts) / len(counts)


def _num_chosen(x: Tensor, weights: Mapping[str, Tensor], layer: int, topk: int) -> int:
    ids, _ = route(x, weights[f"layers.{layer}.router"], weights[f"layers.{layer}.correction_bias"], topk)
    return int(torch.unique(ids).numel())
