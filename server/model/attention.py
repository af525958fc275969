"""Attention of one decoder layer, dense or sparse, on the heads of one rank."""

from collections.abc import Mapping

from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kernels.dense_attention import dense_attention
from server.kernels.linear import linear
from server.kernels.msa_attention import msa_attention
from server.kernels.qkv_norm_rope_cache import qkv_norm_rope_cache
from server.kernels.selection_rule import SelectionRule
from server.model.config import TextConfig
from server.model.quantization import projection


class Attention:
    """Project, write the cache, select blocks if the layer is sparse, attend and project back; a partial sum of one rank."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: TextConfig) -> None:
        self._qkv = projection(weights, f"{prefix}.qkv")  # [(Hq + 2 * Hkv) * D + (Hi + 1) * Di, hidden]
        self._out = projection(weights, f"{prefix}.out")  # [hidden, Hq * D]
        self._q_norm, self._k_norm = weights[f"{prefix}.q_norm"], weights[f"{prefix}.k_norm"]
        self._index_q_norm = weights.get(f"{prefix}.index_q_norm")  # None on a dense layer
        self._index_k_norm = weights.get(f"{prefix}.index_k_norm")
        self._num_heads = self._out.shape[1] // config.head_dim
        self._rule = SelectionRule(config.topk_blocks, config.num_init_blocks, config.num_local_blocks)
        self._config = config

    def __call__(self, x: Tensor, batch: AttentionBatch, cos_sin: Tensor, kv_lane: Tensor, index_lane: Tensor | None) -> Tensor:
        """[T, hidden] to [T, hidden]; writes the step's keys and values into the lanes."""
        config = self._config
        q, index_q = qkv_norm_rope_cache(
            linear(x, self._qkv),
            self._q_norm,
            self._k_norm,
            self._index_q_norm,
            self._index_k_norm,
            cos_sin,
            batch,
            kv_lane,
            index_lane,
            self._num_heads,
            config.rms_norm_eps,
        )
        scale = config.head_dim**-0.5
        if index_q is None or index_lane is None:
            attended = dense_attention(q, kv_lane, batch, scale)
        else:
            attended = msa_attention(q, index_q, kv_lane, index_lane, batch, self._rule, scale)
        return linear(attended.flatten(1), self._out)
