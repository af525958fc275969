"""The decoder: layers around a residual stream, from token embeddings to normed hidden states."""

from collections.abc import Callable, Mapping

from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.norm import gemma_rms_norm
from server.kvcache.pools import CachePools
from server.model.attention import Attention
from server.model.config import TextConfig
from server.model.mlp import MoeMlp, SwiGlu
from server.model.shard import Collective


class DecoderLayer:
    """The parts of one layer; what joins the ranks between them belongs to the stream, which adds and normalises with it."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, config: TextConfig) -> None:
        prefix = f"layers.{layer}"
        self.input_norm = weights[f"{prefix}.input_norm"]  # [hidden]
        self.post_norm = weights[f"{prefix}.post_norm"]  # [hidden]
        self.attention = Attention(weights, prefix, config)
        self.mlp: Callable[[Tensor], Tensor]
        self.mlp = MoeMlp(weights, prefix, config) if config.layer_is_moe[layer] else SwiGlu(weights, f"{prefix}.mlp", config)


class TextModel:
    """All decoder layers and the final norm."""

    def __init__(self, weights: Mapping[str, Tensor], config: TextConfig, cos_sin: Tensor, collective: Collective) -> None:
        self._layers = [DecoderLayer(weights, layer, config) for layer in range(config.num_layers)]
        self._collective = collective
        self._final_norm = weights["norm"]
        self._cos_sin = cos_sin  # [max_positions, rotary_dim] fp32
        self._layer_is_sparse = config.layer_is_sparse
        self._eps = config.rms_norm_eps

    def __call__(self, embedded: Tensor, batch: AttentionBatch, pools: CachePools) -> Tensor:
        """[T, hidden] embeddings to [T, hidden] after the final norm; writes the step's tokens into every lane.

        `pools` must be of this model's layers: a sparse one without index keys would attend to everything.
        """
        assert pools.spec.layer_is_sparse == self._layer_is_sparse, "the cache is that of other layers"
        residual, join = embedded, self._collective.add_rms_norm
        normed = gemma_rms_norm(residual, self._layers[0].input_norm, self._eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for i, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = layer.attention(normed, batch, self._cos_sin, pools.kv_lane(i), pools.index_lane(i))
            normed, residual = join(attended, residual, layer.post_norm, self._eps)
            normed, residual = join(layer.mlp(normed), residual, next_norm, self._eps)
        return normed
