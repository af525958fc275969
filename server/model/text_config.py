"""The decoder's part of `config.json`, in the released spelling and in the one of re-saved checkpoints.

Released files nest the index settings in `sparse_attention_config` and flag layers by 0 and 1; re-saved ones have flat
`index_*` keys and name the kind of each layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from server.model.config_reader import Section

_SPARSE: Mapping[object, bool] = {"minimax_m3_sparse": True, "full_attention": False}
_MOE: Mapping[object, bool] = {"sparse": True, "dense": False}
_FLAG: Mapping[object, bool] = {1: True, 0: False}


@dataclass(frozen=True)
class TextConfig:
    """The decoder. Widths are in elements, lengths in tokens.

    Attributes:
        rotary_dim: leading dimensions of a head that are rotated, for main and index heads alike.
        intermediate_size: width of one routed expert.
        dense_intermediate_size: width of the MLP of layers without experts.
        shared_intermediate_size: width of the shared expert.
        index_num_heads: index query heads; head h selects for KV head h.
        block_size: tokens per sparse block, which is also the cache's page size.
        topk_blocks: blocks a query attends to, forced ones included.
        num_local_blocks: forced blocks that end with the query's own.
        num_init_blocks: forced blocks at the start of the sequence.
        layer_is_sparse: per layer, whether its attention selects blocks.
        layer_is_moe: per layer, whether its MLP has experts.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    intermediate_size: int
    dense_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_beta: float
    swiglu_limit: float
    index_num_heads: int
    index_dim: int
    block_size: int
    topk_blocks: int
    num_local_blocks: int
    num_init_blocks: int
    layer_is_sparse: tuple[bool, ...]
    layer_is_moe: tuple[bool, ...]


def read_text_config(section: Section) -> TextConfig:
    """Read `text_config`; faults go to the section's problems."""
    _refuse_unsupported_text(section)
    sparse = section.section("sparse_attention_config") or Section(
        {}, section.problems, f"{section.path}.sparse_attention_config"
    )
    _refuse_unsupported_sparse(sparse)
    num_layers = section.integer("num_hidden_layers")
    head_dim = section.integer("head_dim")

    def index_key(flat: str, nested: str) -> int:
        holder, name = (section, flat) if section.has(flat) else (sparse, nested)
        return holder.integer(name)

    block_size = index_key("index_block_size", "sparse_block_size")
    text = TextConfig(
        hidden_size=section.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=section.integer("num_attention_heads"),
        num_kv_heads=section.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=_rotary_dim(section, head_dim),
        rope_theta=(section.section("rope_parameters") or section).number("rope_theta"),
        vocab_size=section.integer("vocab_size"),
        max_position_embeddings=section.integer("max_position_embeddings"),
        rms_norm_eps=section.number("rms_norm_eps"),
        intermediate_size=section.integer("intermediate_size"),
        dense_intermediate_size=section.integer("dense_intermediate_size"),
        shared_intermediate_size=section.integer("shared_intermediate_size"),
        num_experts=section.integer("num_local_experts", "num_experts"),
        num_experts_per_token=section.integer("num_experts_per_tok"),
        routed_scaling_factor=section.number("routed_scaling_factor"),
        swiglu_alpha=section.number("swiglu_alpha"),
        swiglu_beta=section.number("swiglu_beta", default=1.0),
        swiglu_limit=section.number("swiglu_limit"),
        index_num_heads=index_key("index_n_heads", "sparse_num_index_heads"),
        index_dim=index_key("index_head_dim", "sparse_index_dim"),
        block_size=block_size,
        topk_blocks=index_key("index_topk_blocks", "sparse_topk_blocks"),
        num_local_blocks=_local_blocks(section, sparse, block_size),
        num_init_blocks=_init_blocks(sparse, block_size),
        layer_is_sparse=_layer_kinds(section, "layer_types", _SPARSE, sparse, "sparse_attention_freq", num_layers),
        layer_is_moe=_layer_kinds(section, "mlp_layer_types", _MOE, section, "moe_layer_freq", num_layers),
    )
    if not section.problems.found:  # stand-ins for faulty values would only add noise
        _check_relations(text, section)
    return text


def _refuse_unsupported_text(section: Section) -> None:
    section.supports("model_type", ["minimax_m3", "minimax_m3_text", "minimax_m3_vl_text", "minimax_m3_vl"])
    section.supports("hidden_act", ["swigluoai", "silu"])  # re-saved configs say silu and still mean SwiGLU-OAI
    section.supports("attention_output_gate", [False])
    section.supports("use_gemma_norm", [True])
    section.supports("use_qk_norm", [True])
    section.supports("qk_norm_type", ["per_head"])
    section.supports("scoring_func", ["sigmoid"])
    section.supports("use_routing_bias", [True])
    section.supports("n_shared_experts", [1])
    section.supports("tie_word_embeddings", [False])
    section.supports("n_group", [1])
    section.supports("topk_group", [1])
    for name in ("rope_parameters", "rope_scaling"):
        rope = section.section(name)
        if rope:
            rope.supports("rope_type", ["default"])
            rope.supports("type", ["default"])


def _refuse_unsupported_sparse(sparse: Section) -> None:
    sparse.supports("use_sparse_attention", [True])
    sparse.supports("sparse_score_type", ["max"])
    freq, no_value = sparse.values.get("sparse_attention_freq"), sparse.values.get("sparse_disable_index_value")
    if no_value is not None and no_value != freq:
        sparse.missing("sparse_disable_index_value", "index values are not supported (it must equal sparse_attention_freq)")


def _rotary_dim(section: Section, head_dim: int) -> int:
    """`partial_rotary_factor * head_dim`, or `rotary_dim`; a file that gives both must mean the same."""
    rope = section.section("rope_parameters")
    holder = rope if rope and rope.has("partial_rotary_factor") else section
    if not holder.has("partial_rotary_factor"):
        return section.integer("rotary_dim")
    rotary_dim = int(head_dim * holder.number("partial_rotary_factor"))
    if section.has("rotary_dim") and section.integer("rotary_dim") != rotary_dim:
        section.missing("rotary_dim", f"contradicts partial_rotary_factor, which makes it {rotary_dim}")
    return rotary_dim


def _local_blocks(section: Section, sparse: Section, block_size: int) -> int:
    if section.has("index_local_blocks"):
        return section.integer("index_local_blocks", minimum=0)
    if not sparse.has("sparse_local_block") and sparse.has("sparse_local_tokens"):
        return -(-sparse.integer("sparse_local_tokens", minimum=0) // block_size) + 1
    return sparse.integer("sparse_local_block", minimum=0)


def _init_blocks(sparse: Section, block_size: int) -> int:
    if not sparse.has("sparse_init_block") and sparse.has("sparse_init_tokens"):
        return -(-sparse.integer("sparse_init_tokens", minimum=0) // block_size)
    return sparse.integer("sparse_init_block", default=0, minimum=0)


def _layer_kinds(
    named: Section, names_key: str, names: Mapping[object, bool], flagged: Section, flags_key: str, num_layers: int
) -> tuple[bool, ...]:
    """Per-layer kinds from a list of names or a list of 0/1; both may be given if they agree."""
    by_name = named.layers(names_key, num_layers, names) if named.has(names_key) else None
    by_flag = flagged.layers(flags_key, num_layers, _FLAG) if flagged.has(flags_key) else None
    if by_name is not None and by_flag is not None and by_name != by_flag:
        flagged.missing(flags_key, f"contradicts {names_key}")
    kinds = by_name if by_name is not None else by_flag
    if kinds is None:
        flagged.missing(flags_key, f"is missing, and so is {names_key}")
        return (False,) * num_layers
    return kinds


def _check_relations(text: TextConfig, section: Section) -> None:
    checks = (
        ("num_attention_heads", text.num_heads % text.num_kv_heads == 0, "must be a multiple of num_key_value_heads"),
        ("index heads", text.index_num_heads == text.num_kv_heads, "must be as many as num_key_value_heads"),
        ("rotary_dim", text.rotary_dim % 2 == 0, "must be even"),
        ("rotary_dim", text.rotary_dim <= min(text.head_dim, text.index_dim), "exceeds the width of a head"),
        ("num_experts_per_tok", text.num_experts_per_token <= text.num_experts, "exceeds the number of experts"),
        ("sparse blocks", text.num_local_blocks + text.num_init_blocks <= text.topk_blocks, "more are forced than selected"),
    )
    for name, holds, complaint in checks:
        if not holds:
            section.missing(name, complaint)
