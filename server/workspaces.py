"""Estimates of what a step takes on a GPU for a moment, for sizing before anything runs.

An engine measures it when it starts; these formulas say beforehand whether a start makes sense. They count the largest tensors
of the kinds of steps, one layer's, as the kernels allocate them; see docs/kernels.md.
"""

import torch

from server.model.config import M3Config
from server.model.decode_graphs import batch_ladder, context_ladder
from server.model.media_features import MAX_BATCH_TOKENS
from server.model.shard import Shard
from server.model.weights import parameters
from server.sizing import MemoryUse, StepLimits, weights_bytes

CONTEXT_BYTES = 1 << 30
"""The CUDA context, loaded kernels and NCCL's buffers."""

GRAPH_LAYER_BYTES = 256 << 10
"""What the driver keeps of one captured decode step, per layer of some twenty kernels; a guess until it is measured."""

_LOGIT_COPIES = 4  # of a step's logits in the model dtype: a rank's, all ranks', in order, and kept for the sampler
_SCORE_BYTES = 8  # per logit: adjusted in fp32, and as log-probabilities
_STATE_BYTES = 4  # per token of the vocabulary: what the sampler keeps of a penalised sequence
_STREAM_TENSORS = 4  # [T, hidden]: residual, its sum, the normed input and the sublayer's output


def workspace_bytes(config: M3Config, shard: Shard, itemsize: int, limits: StepLimits) -> int:
    """Peak of the largest step of one rank, with what earlier steps left behind.

    Args:
        config: of the checkpoint.
        shard: the rank.
        itemsize: bytes per activation.
        limits: the largest steps.

    Raises:
        ValueError: the model cannot be cut for that many ranks.
    """
    text = config.text
    num_tokens = limits.max_num_batched_tokens
    num_samples = min(limits.max_num_seqs, num_tokens)
    num_streams = _STREAM_TENSORS if config.vision is None else _STREAM_TENSORS + 2  # features, and in the rows' order
    stream = num_streams * num_tokens * text.hidden_size * itemsize
    scores, rest = _attention(config, shard, itemsize, limits)
    layer = scores + max(rest, _mlp(config, shard, itemsize, num_tokens))
    # The allocator keeps what scores and pictures gave back, and it does not fit what comes behind them.
    step = max(stream + layer, num_samples * text.vocab_size * (_LOGIT_COPIES * itemsize + _SCORE_BYTES))
    step += _vision(config, itemsize)
    return step + _penalties(text.vocab_size, limits.max_num_seqs)


def _penalties(vocab_size: int, max_num_seqs: int) -> int:
    """What stays between steps when every sequence is penalised; the rows double when none is free (`RowPool`)."""
    return (1 << (max_num_seqs - 1).bit_length()) * vocab_size * _STATE_BYTES


def _attention(config: M3Config, shard: Shard, itemsize: int, limits: StepLimits) -> tuple[int, int]:
    """Projections with block scores, and the partial results of page-major sparse attention."""
    text = config.text
    num_kv_heads = _len(shard.kv_heads(text.num_kv_heads))
    query_width = _len(shard.even(text.num_heads, "num_attention_heads")) * text.head_dim
    index_width = num_kv_heads * text.index_dim
    projected = 3 * query_width + 2 * index_width + 2 * num_kv_heads * text.head_dim + text.index_dim
    num_blocks = -(-limits.max_model_len // text.block_size)
    scores = 4 * num_kv_heads * num_blocks * 17 // 16  # fp32, and the maximum of every 16 blocks
    num_places = text.topk_blocks - 1  # blocks besides the own one
    partials = num_places * (query_width * itemsize + num_kv_heads * 16)  # with log-sum-exp and work lists
    num_tokens = limits.max_num_batched_tokens
    return num_tokens * (projected * itemsize + scores), num_tokens * partials


def _mlp(config: M3Config, shard: Shard, itemsize: int, num_tokens: int) -> int:
    """Input, activation and output of every (token, expert) pair; or the dense MLP."""
    text = config.text
    pair = 2 * text.hidden_size + _len(shard.even(text.intermediate_size, "intermediate_size"))
    dense = 3 * _len(shard.even(text.dense_intermediate_size, "dense_intermediate_size"))
    per_token = max(text.num_experts_per_token * pair, dense)
    return num_tokens * per_token * itemsize


def _len(share: slice) -> int:
    return int(share.stop - share.start)


def _vision(config: M3Config, itemsize: int) -> int:
    """Encoding as many patches as are encoded together."""
    vision = config.vision
    if vision is None:
        return 0
    patch = vision.num_channels * vision.temporal_patch_size * vision.patch_size**2
    per_patch = 4 * (patch + vision.hidden_size) + itemsize * (8 * vision.hidden_size + 2 * vision.intermediate_size)
    return MAX_BATCH_TOKENS * vision.spatial_merge_size**2 * per_patch


def graphs_bytes(config: M3Config, itemsize: int, limits: StepLimits) -> int:
    """The captured decode steps of one rank: the driver's nodes, and the memory of the largest step, which all share."""
    text = config.text
    num_graphs = len(batch_ladder(limits.max_num_seqs)) * len(context_ladder(limits.max_model_len))
    row_bytes = _LOGIT_COPIES * itemsize * text.vocab_size + _STREAM_TENSORS * text.hidden_size * itemsize
    return num_graphs * text.num_layers * GRAPH_LAYER_BYTES + limits.max_num_seqs * row_bytes


def estimated_use(
    config: M3Config, shard: Shard, dtype: torch.dtype, limits: StepLimits, feature_cache_bytes: int
) -> MemoryUse:
    """What one rank will hold beside the cache.

    Raises:
        ValueError: the model cannot be cut for that many ranks.
    """
    tables = 4 * config.text.max_position_embeddings * config.text.rotary_dim  # cosines and sines of every position, fp32
    return MemoryUse(
        weights=weights_bytes(parameters(config, shard), dtype) + tables,
        workspaces=workspace_bytes(config, shard, dtype.itemsize, limits),
        graphs=graphs_bytes(config, dtype.itemsize, limits),
        features=feature_cache_bytes,
    )
