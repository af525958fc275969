"""The two kinds of MLP of a decoder layer: one SwiGLU, or routed experts beside a shared one; partial sums of one rank."""

from collections.abc import Mapping

from torch import Tensor

from server.kernels.linear import linear
from server.kernels.moe import moe, route
from server.kernels.swiglu import swiglu_oai
from server.model.config import TextConfig
from server.model.quantization import projection


class SwiGlu:
    """`down(swiglu(gate x, up x))` on this rank's share of the width; the MLP of layers without experts."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: TextConfig) -> None:
        self._gate_up = projection(weights, f"{prefix}.gate_up")  # [2 * I, hidden]
        self._down = projection(weights, f"{prefix}.down")  # [hidden, I]
        self._config = config

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        gate, up = linear(x, self._gate_up).chunk(2, dim=-1)
        config = self._config
        return linear(swiglu_oai(gate, up, config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit), self._down)


class MoeMlp:
    """Top-k routed experts, scaled, plus the shared expert, which is neither gated nor scaled."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: TextConfig) -> None:
        self._router = weights[f"{prefix}.router"]  # [E, hidden] fp32
        self._correction_bias = weights[f"{prefix}.correction_bias"]  # [E] fp32
        self._w13 = projection(weights, f"{prefix}.w13")  # [E, 2 * I, hidden]; E + 1 with the shared expert
        self._w2 = projection(weights, f"{prefix}.w2")  # [E, hidden, I]
        self._shared = None  # in the stack of experts
        if self._w2.shape[0] == config.num_experts:
            self._shared = SwiGlu(weights, f"{prefix}.shared", config)
        self._config = config

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        config = self._config
        expert_ids, expert_weights = route(x, self._router, self._correction_bias, config.num_experts_per_token)
        out = moe(
            x,
            self._w13,
            self._w2,
            expert_ids,
            expert_weights,
            config.swiglu_alpha,
            config.swiglu_beta,
            config.swiglu_limit,
            config.routed_scaling_factor,
            has_shared=self._shared is None,
        )
        return out if self._shared is None else out + self._shared(x)
