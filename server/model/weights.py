"""The model's parameters: their shapes on one rank, and which released tensors they are made of.

Released names and shapes are those of MiniMaxAI/MiniMax-M3. Projections that are multiplied with the same input are stacked
into one parameter: q | k | v | index q | index k, gate | up, and all experts of a layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from server.model.config import M3Config, TextConfig, VisionConfig
from server.model.parameter import WHOLE, Parameter, Piece, in_format
from server.model.quantization import Quantization
from server.model.shard import Shard

__all__ = ["Parameter", "Piece", "parameters"]


def parameters(config: M3Config, shard: Shard) -> tuple[Parameter, ...]:
    """All parameters of one rank.

    Raises:
        ValueError: the model cannot be cut for that many ranks; names what resists.
    """
    found = [
        p for parameter in _text(config.text, shard, config.quantization) for p in in_format(parameter, config.quantization)
    ]
    if config.vision:
        found += _vision(config.vision)
        found += _projector(config.vision, config.text.hidden_size)
    return tuple(found)


def _plain(name: str, released: str, *shape: int, dtype: torch.dtype | None = None) -> Parameter:
    return Parameter(name, shape, (Piece(released, shape),), dtype)


def _stacked(name: str, pieces: Sequence[Piece], *, is_projection: bool = False) -> Parameter:
    """Pieces below each other: they agree in all dimensions but the first."""
    placed, begin = [], 0
    for piece in pieces:
        end = begin + piece.cut_shape[0]
        placed.append(replace(piece, into=(slice(begin, end),)))
        begin = end
    return Parameter(name, (begin, *pieces[0].cut_shape[1:]), tuple(placed), is_projection=is_projection)


def _text(config: TextConfig, shard: Shard, quantization: Quantization | None) -> Iterator[Parameter]:
    root, hidden = "language_model.model", config.hidden_size
    yield _plain("embed", f"{root}.embed_tokens.weight", config.vocab_size, hidden)
    head = Piece("language_model.lm_head.weight", (config.vocab_size, hidden), (shard.vocab(config.vocab_size),))
    yield Parameter("lm_head", head.cut_shape, (head,))
    yield _plain("norm", f"{root}.norm.weight", hidden)
    for layer in range(config.num_layers):
        ours, released = f"layers.{layer}", f"{root}.layers.{layer}"
        yield _plain(f"{ours}.input_norm", f"{released}.input_layernorm.weight", hidden)
        yield _plain(f"{ours}.post_norm", f"{released}.post_attention_layernorm.weight", hidden)
        yield from _attention(ours, f"{released}.self_attn", config, shard, config.layer_is_sparse[layer])
        if config.layer_is_moe[layer]:
            yield from _moe(ours, f"{released}.block_sparse_moe", config, shard, quantization)
        else:
            yield from _mlp(f"{ours}.mlp", f"{released}.mlp", hidden, config.dense_intermediate_size, shard)


def _attention(ours: str, released: str, config: TextConfig, shard: Shard, is_sparse: bool) -> Iterator[Parameter]:
    hidden, dim, index_dim = config.hidden_size, config.head_dim, config.index_dim

    def head_rows(heads: slice, width: int) -> tuple[slice]:
        return (slice(heads.start * width, heads.stop * width),)

    q_rows = head_rows(shard.even(config.num_heads, "num_attention_heads"), dim)
    kv_heads = shard.kv_heads(config.num_kv_heads)
    projections = [
        Piece(f"{released}.q_proj.weight", (config.num_heads * dim, hidden), q_rows),
        Piece(f"{released}.k_proj.weight", (config.num_kv_heads * dim, hidden), head_rows(kv_heads, dim)),
        Piece(f"{released}.v_proj.weight", (config.num_kv_heads * dim, hidden), head_rows(kv_heads, dim)),
    ]
    if is_sparse:
        index_rows = head_rows(kv_heads, index_dim)
        projections += [
            Piece(f"{released}.index_q_proj.weight", (config.index_num_heads * index_dim, hidden), index_rows),
            Piece(f"{released}.index_k_proj.weight", (index_dim, hidden)),
        ]
        yield _plain(f"{ours}.index_q_norm", f"{released}.index_q_norm.weight", index_dim)
        yield _plain(f"{ours}.index_k_norm", f"{released}.index_k_norm.weight", index_dim)
    yield _stacked(f"{ours}.qkv", projections, is_projection=True)
    yield _plain(f"{ours}.q_norm", f"{released}.q_norm.weight", dim)
    yield _plain(f"{ours}.k_norm", f"{released}.k_norm.weight", dim)
    out = Piece(f"{released}.o_proj.weight", (hidden, config.num_heads * dim), (WHOLE, *q_rows))
    yield Parameter(f"{ours}.out", out.cut_shape, (out,), is_projection=True)


def _mlp(ours: str, released: str, hidden: int, width: int, shard: Shard) -> Iterator[Parameter]:
    share = shard.even(width, f"width of {released}")
    gate_up = [Piece(f"{released}.{name}_proj.weight", (width, hidden), (share,)) for name in ("gate", "up")]
    down = Piece(f"{released}.down_proj.weight", (hidden, width), (WHOLE, share))
    yield _stacked(f"{ours}.gate_up", gate_up, is_projection=True)
    yield Parameter(f"{ours}.down", down.cut_shape, (down,), is_projection=True)


def _moe(ours: str, released: str, config: TextConfig, shard: Shard, quantization: Quantization | None) -> Iterator[Parameter]:
    """A shared expert of the routed experts' width and format is the last of their stack, otherwise an MLP of its own."""
    hidden, width, num_experts = config.hidden_size, config.intermediate_size, config.num_experts
    yield _plain(f"{ours}.router", f"{released}.gate.weight", num_experts, hidden, dtype=torch.float32)
    yield _plain(f"{ours}.correction_bias", f"{released}.e_score_correction_bias", num_experts, dtype=torch.float32)
    shared = tuple(f"{released}.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))
    stack = [tuple(f"{released}.experts.{e}.{name}.weight" for name in ("w1", "w3", "w2")) for e in range(num_experts)]
    formats = {bool(quantization and quantization.covers(name)) for name in (*shared, *stack[0])}
    if config.shared_intermediate_size == width and len(formats) == 1:
        stack.append(shared)
    else:
        yield from _mlp(f"{ours}.shared", f"{released}.shared_experts", hidden, config.shared_intermediate_size, shard)
    share = shard.even(width, "intermediate_size")
    local = share.stop - share.start
    w13, w2 = [], []
    for e, (gate, up, down) in enumerate(stack):
        w13.append(Piece(gate, (width, hidden), (share,), (e, slice(0, local))))
        w13.append(Piece(up, (width, hidden), (share,), (e, slice(local, 2 * local))))
        w2.append(Piece(down, (hidden, width), (WHOLE, share), (e,)))
    yield Parameter(f"{ours}.w13", (len(stack), 2 * local, hidden), tuple(w13), is_projection=True)
    yield Parameter(f"{ours}.w2", (len(stack), hidden, local), tuple(w2), is_projection=True)


def _affine(ours: str, released: str, out_width: int, in_width: int) -> Iterator[Parameter]:
    yield _plain(f"{ours}.weight", f"{released}.weight", out_width, in_width)
    yield _plain(f"{ours}.bias", f"{released}.bias", out_width)


def _layer_norm(ours: str, released: str, width: int) -> Iterator[Parameter]:
    yield _plain(f"{ours}.weight", f"{released}.weight", width)
    yield _plain(f"{ours}.bias", f"{released}.bias", width)


def _vision(config: VisionConfig) -> Iterator[Parameter]:
    root, hidden = "vision_tower.vision_model", config.hidden_size
    patch = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    yield _plain("vision.patch", f"{root}.embeddings.patch_embedding.weight", hidden, *patch, dtype=torch.float32)
    yield from _layer_norm("vision.pre_norm", f"{root}.pre_layrnorm", hidden)
    for layer in range(config.num_layers):
        ours, released = f"vision.layers.{layer}", f"{root}.encoder.layers.{layer}"
        yield from _layer_norm(f"{ours}.norm1", f"{released}.layer_norm1", hidden)
        yield from _layer_norm(f"{ours}.norm2", f"{released}.layer_norm2", hidden)
        attention = f"{released}.self_attn"
        yield _stacked(f"{ours}.qkv.weight", [Piece(f"{attention}.{x}_proj.weight", (hidden, hidden)) for x in "qkv"])
        yield _stacked(f"{ours}.qkv.bias", [Piece(f"{attention}.{x}_proj.bias", (hidden,)) for x in "qkv"])
        yield from _affine(f"{ours}.out", f"{attention}.out_proj", hidden, hidden)
        yield from _affine(f"{ours}.fc1", f"{released}.mlp.fc1", config.intermediate_size, hidden)
        yield from _affine(f"{ours}.fc2", f"{released}.mlp.fc2", hidden, config.intermediate_size)


def _projector(config: VisionConfig, text_hidden: int) -> Iterator[Parameter]:
    inner, merged = config.projector_hidden_size, text_hidden * config.spatial_merge_size**2
    yield from _affine("projector.fc1", "multi_modal_projector.linear_1", inner, config.hidden_size)
    yield from _affine("projector.fc2", "multi_modal_projector.linear_2", text_hidden, inner)
    yield from _affine("projector.merge_fc1", "patch_merge_mlp.linear_1", inner, merged)
    yield from _affine("projector.merge_fc2", "patch_merge_mlp.linear_2", text_hidden, inner)
