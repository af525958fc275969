"""The physical limit of a decoder layer: bytes that a step has to read over the copy rate, or its FLOPs over the matrix rate.

Bytes of a layer: its weights, of the routed experts only those that the T tokens hit (counted where a row says so, otherwise
what independent choices hit on average, E * (1 - (1 - k / E)^T)); the index keys of every sequence; keys and values of the
selected blocks (sparse) or of the whole context (dense). Activations and page tables are left out. FLOPs: two per weight and
token, the index scores 2 * Hi * Di per visible key, and 4 * Hq * D per attended key. The limit of several layers is the sum
of theirs.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from benchmarks.timing import limit_us
from server.model.config import TextConfig
from server.model.shard import Shard
from server.model.weights import Parameter

_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")
_EXPERTS = ("w13", "w2")


def expected_experts(num_experts: int, topk: int, num_tokens: int) -> float:
    """Distinct experts that `num_tokens` tokens choose on average when each takes any `topk` of them alike."""
    return num_experts * (1.0 - (1.0 - topk / num_experts) ** num_tokens)


@dataclass(frozen=True)
class Chunk:
    """Query tokens of one sequence: positions `start` to `start + num_tokens`."""

    start: int
    num_tokens: int

    @property
    def num_keys(self) -> int:
        """Tokens that the last query sees, itself included."""
        return self.start + self.num_tokens

    @property
    def num_visible(self) -> int:
        """Visible keys, summed over the queries."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2

    def num_attended(self, window: int, block: int) -> int:
        """Keys of selected blocks, summed over the queries: all while they fit into `window` keys."""
        positions = torch.arange(self.start, self.num_keys)
        own = positions % block + 1
        return int(torch.minimum(positions + 1, window - block + own).sum())


@dataclass(frozen=True)
class Work:
    """What a layer has to do at least."""

    num_bytes: float
    flops: float

    @property
    def limit_us(self) -> float:
        """Microseconds, see `timing.limit_us`."""
        return limit_us(self.num_bytes, self.flops)


class LayerLimits:
    """Limits of the layers of one rank's model."""

    def __init__(self, config: TextConfig, shard: Shard, parameters: Iterable[Parameter], itemsize: int) -> None:
        """`itemsize` is the model dtype's, in bytes; cache entries have it, too."""
        self._config = config
        self._itemsize = itemsize
        kv_heads = shard.kv_heads(config.num_kv_heads)
        heads = shard.even(config.num_heads, "heads")
        self._num_kv_heads, self._num_heads = kv_heads.stop - kv_heads.start, heads.stop - heads.start
        self._shared: dict[int, list[Parameter]] = {}
        self._experts: dict[int, list[Parameter]] = {}
        for parameter in parameters:
            if match := _LAYER.match(parameter.name):
                group = self._experts if match[2] in _EXPERTS else self._shared
                group.setdefault(int(match[1]), []).append(parameter)

    def layer(self, layer: int, chunks: Sequence[Chunk], distinct: float | None = None) -> Work:
        """The least work of `layer` in a step over `chunks` that touches `distinct` routed experts; as expected if None."""
        config = self._config
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        shared, experts = self._shared[layer], self._experts.get(layer, [])
        if distinct is None:
            distinct = expected_experts(config.num_experts, config.num_experts_per_token, num_tokens)
        num_bytes = sum(map(self._bytes, shared)) + sum(self._bytes(p) * self._share(p, distinct) for p in experts)
        chosen = float(config.num_experts_per_token)
        per_token = sum(map(_num_products, shared)) + sum(_num_products(p) * self._share(p, chosen) for p in experts)
        flops = 2.0 * num_tokens * per_token
        window = config.topk_blocks * config.block_size
        is_sparse = config.layer_is_sparse[layer]
        kv_bytes = 2 * self._num_kv_heads * config.head_dim * self._itemsize  # of a token
        for chunk in chunks:
            attended = chunk.num_attended(window, config.block_size) if is_sparse else chunk.num_visible
            flops += 4.0 * self._num_heads * config.head_dim * attended
            touched = min(chunk.num_keys, attended) if is_sparse else chunk.num_keys
            num_bytes += kv_bytes * touched
            if is_sparse:
                flops += 2.0 * self._num_kv_heads * config.index_dim * chunk.num_visible
                num_bytes += config.index_dim * self._itemsize * chunk.num_keys
        return Work(num_bytes, flops)

    def limit_us(self, layers: Iterable[int], chunks: Sequence[Chunk], distinct: float | None = None) -> float:
        """Sum of the limits of `layers`; see `layer`."""
        return sum(self.layer(layer, chunks, distinct).limit_us for layer in layers)

    def _share(self, stack: Parameter, num_routed: float) -> float:
        """The part of a stack of experts that is used; behind the routed ones there may be the shared one."""
        return (num_routed + stack.shape[0] - self._config.num_experts) / stack.shape[0]

    def _bytes(self, parameter: Parameter) -> float:
        return prod(parameter.shape) * (parameter.dtype.itemsize if parameter.dtype else self._itemsize)


def _num_products(parameter: Parameter) -> int:
    """Weights that every token is multiplied with: those of matrices, not their scales."""
    return prod(parameter.shape) if len(parameter.shape) > 1 and parameter.dtype is not torch.uint8 else 0
