"""Random weights of the tiny checkpoint, under the released tensor names and dtypes.

Values are uniform and come straight from the bits of a seeded PCG64 stream, so every machine and library version makes the
same bytes. Only shapes, scales and the shape of the output distribution are decided here; nothing is trained.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

SEED = 3
# Logits of tokens that cannot stand in a text alone are shrunk towards zero, so that samples look like text.
UNLIKELY_SCALE = 0.05
LOGIT_STD = 3.0

Spec = tuple[str, tuple[int, ...], float, float, torch.dtype]  # name, shape, centre, standard deviation, dtype


def make_weights(config: Mapping[str, Any], likely_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint.

    Args:
        config: the content of config.json, in the released spelling.
        likely_ids: tokens that a sample may contain often: printable text and the end of the turn.
    """
    stream = np.random.Generator(np.random.PCG64(SEED))
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, centre, std, dtype in [*_text_specs(config["text_config"]), *_vision_specs(config)]:
        half_width = std * math.sqrt(3.0)
        values = centre + (stream.random(shape) * 2.0 - 1.0) * half_width
        tensors[name] = torch.from_numpy(values).to(dtype)
    head = tensors["language_model.lm_head.weight"]
    scale = torch.full((head.shape[0], 1), UNLIKELY_SCALE, dtype=head.dtype)
    scale[list(likely_ids)] = 1.0
    tensors["language_model.lm_head.weight"] = head * scale
    return tensors


def _linear(name: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Spec:
    """A projection [rows, columns] that keeps the variance of its input."""
    return f"{name}.weight", (rows, columns), 0.0, columns**-0.5, dtype


def _biased(name: str, rows: int, columns: int) -> tuple[Spec, Spec]:
    """A projection with a bias."""
    return _linear(name, rows, columns), (f"{name}.bias", (rows,), 0.0, 0.02, torch.bfloat16)


def _norm(name: str, size: int) -> Spec:
    """The weight of a Gemma norm, which scales by 1 + weight."""
    return f"{name}.weight", (size,), 0.0, 0.1, torch.bfloat16


def _layer_norm(name: str, size: int) -> tuple[Spec, Spec]:
    """Weight and bias of a layer norm."""
    return (f"{name}.weight", (size,), 1.0, 0.1, torch.bfloat16), (f"{name}.bias", (size,), 0.0, 0.02, torch.bfloat16)


def _text_specs(text: Mapping[str, Any]) -> Iterator[Spec]:
    """The language model."""
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield "language_model.model.embed_tokens.weight", (vocab, hidden), 0.0, 1.0, torch.bfloat16
    for layer in range(text["num_hidden_layers"]):
        prefix = f"language_model.model.layers.{layer}."
        yield _norm(f"{prefix}input_layernorm", hidden)
        yield from _attention_specs(text, f"{prefix}self_attn.", bool(_sparse(text)["sparse_attention_freq"][layer]))
        yield _norm(f"{prefix}post_attention_layernorm", hidden)
        if text["moe_layer_freq"][layer]:
            yield from _moe_specs(text, f"{prefix}block_sparse_moe.")
        else:
            yield from _mlp_specs(f"{prefix}mlp.", text["dense_intermediate_size"], hidden)
    yield _norm("language_model.model.norm", hidden)
    yield "language_model.lm_head.weight", (vocab, hidden), 0.0, LOGIT_STD * hidden**-0.5, torch.bfloat16


def _sparse(text: Mapping[str, Any]) -> Mapping[str, Any]:
    sparse: Mapping[str, Any] = text["sparse_attention_config"]
    return sparse


def _attention_specs(text: Mapping[str, Any], prefix: str, is_sparse: bool) -> Iterator[Spec]:
    """Projections and head norms of one layer; sparse layers also have an indexer."""
    hidden, head_dim = text["hidden_size"], text["head_dim"]
    query, key = text["num_attention_heads"] * head_dim, text["num_key_value_heads"] * head_dim
    yield _linear(f"{prefix}q_proj", query, hidden)
    yield _linear(f"{prefix}k_proj", key, hidden)
    yield _linear(f"{prefix}v_proj", key, hidden)
    yield _linear(f"{prefix}o_proj", hidden, query)
    yield _norm(f"{prefix}q_norm", head_dim)
    yield _norm(f"{prefix}k_norm", head_dim)
    if is_sparse:
        index_dim, num_index_heads = _sparse(text)["sparse_index_dim"], _sparse(text)["sparse_num_index_heads"]
        yield _linear(f"{prefix}index_q_proj", num_index_heads * index_dim, hidden)
        yield _linear(f"{prefix}index_k_proj", index_dim, hidden)
        yield _norm(f"{prefix}index_q_norm", index_dim)
        yield _norm(f"{prefix}index_k_norm", index_dim)


def _mlp_specs(prefix: str, intermediate: int, hidden: int) -> Iterator[Spec]:
    """A gated MLP."""
    yield _linear(f"{prefix}gate_proj", intermediate, hidden)
    yield _linear(f"{prefix}up_proj", intermediate, hidden)
    yield _linear(f"{prefix}down_proj", hidden, intermediate)


def _moe_specs(text: Mapping[str, Any], prefix: str) -> Iterator[Spec]:
    """Router, experts and the shared expert."""
    hidden, intermediate, num_experts = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield _linear(f"{prefix}gate", num_experts, hidden, torch.float32)
    yield f"{prefix}e_score_correction_bias", (num_experts,), 0.0, 0.05, torch.float32
    for expert in range(num_experts):
        yield _linear(f"{prefix}experts.{expert}.w1", intermediate, hidden)
        yield _linear(f"{prefix}experts.{expert}.w3", intermediate, hidden)
        yield _linear(f"{prefix}experts.{expert}.w2", hidden, intermediate)
    yield from _mlp_specs(f"{prefix}shared_experts.", text["shared_intermediate_size"], hidden)


def _vision_specs(config: Mapping[str, Any]) -> Iterator[Spec]:
    """Vision tower, projector and patch merger."""
    vision, hidden = config["vision_config"], config["vision_config"]["hidden_size"]
    merge = vision["img_token_compression_config"]
    patch_shape = (vision["num_channels"], merge["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    tower = "vision_tower.vision_model."
    patch_std = math.prod(patch_shape) ** -0.5
    yield f"{tower}embeddings.patch_embedding.weight", (hidden, *patch_shape), 0.0, patch_std, torch.float32
    yield from _layer_norm(f"{tower}pre_layrnorm", hidden)
    for layer in range(vision["num_hidden_layers"]):
        prefix = f"{tower}encoder.layers.{layer}."
        yield from _layer_norm(f"{prefix}layer_norm1", hidden)
        yield from _layer_norm(f"{prefix}layer_norm2", hidden)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _biased(f"{prefix}self_attn.{name}", hidden, hidden)
        yield from _biased(f"{prefix}mlp.fc1", vision["intermediate_size"], hidden)
        yield from _biased(f"{prefix}mlp.fc2", hidden, vision["intermediate_size"])
    projector, text_hidden = config["projector_hidden_size"], config["text_config"]["hidden_size"]
    yield from _biased("multi_modal_projector.linear_1", projector, hidden)
    yield from _biased("multi_modal_projector.linear_2", text_hidden, projector)
    yield from _biased("patch_merge_mlp.linear_1", text_hidden, text_hidden * merge["spatial_merge_size"] ** 2)
    yield from _biased("patch_merge_mlp.linear_2", text_hidden, text_hidden)
