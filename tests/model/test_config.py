import copy
import json

import pytest
import torch

from server.model.config import RELEASED_DIR, ConfigError, M3Config, TextConfig, VisionConfig, cache_spec
from server.model.shard import Shard
from server.model.weights import parameters
from tests.oracle import tiny_config

RELEASED = json.loads((RELEASED_DIR / "config.json").read_text())


@pytest.fixture
def read(tmp_path):
    """Writes values as config.json and reads it."""

    def write_and_read(values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return M3Config.from_file(tmp_path)

    return write_and_read


@pytest.fixture
def values():
    return copy.deepcopy(RELEASED)


def resaved(values):
    """The released model in the flat spelling of re-saved checkpoints."""
    text, vision = values["text_config"], values["vision_config"]
    sparse = text.pop("sparse_attention_config")
    text["index_n_heads"] = sparse["sparse_num_index_heads"]
    text["index_head_dim"] = sparse["sparse_index_dim"]
    text["index_block_size"] = sparse["sparse_block_size"]
    text["index_topk_blocks"] = sparse["sparse_topk_blocks"]
    text["index_local_blocks"] = sparse["sparse_local_block"]
    text["layer_types"] = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57
    text["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in text.pop("moe_layer_freq")]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": text.pop("rope_theta"), "partial_rotary_factor": 0.5}
    del text["partial_rotary_factor"]
    text["num_experts"] = text.pop("num_local_experts")
    text["hidden_act"] = "silu"
    text["model_type"] = "minimax_m3_vl_text"
    del vision["img_token_compression_config"], vision["rope_mode"], vision["position_embedding_type"]
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
    vision |= {"model_type": "minimax_m3_vl_vision", "spatial_merge_size": 2, "temporal_patch_size": 2}
    del vision["vision_segment_max_frames"]
    values["image_token_id"] = values.pop("image_token_index")
    values["video_token_id"] = values.pop("video_token_index")
    return values


def test_the_released_file(read, values):
    assert read(values) == M3Config(
        text=TextConfig(
            hidden_size=6144,
            num_layers=60,
            num_heads=64,
            num_kv_heads=4,
            head_dim=128,
            rotary_dim=64,
            rope_theta=5e6,
            vocab_size=200064,
            max_position_embeddings=1048576,
            rms_norm_eps=1e-6,
            intermediate_size=3072,
            dense_intermediate_size=12288,
            shared_intermediate_size=3072,
            num_experts=128,
            num_experts_per_token=4,
            routed_scaling_factor=2.0,
            swiglu_alpha=1.702,
            swiglu_beta=1.0,
            swiglu_limit=7.0,
            index_num_heads=4,
            index_dim=128,
            block_size=128,
            topk_blocks=16,
            num_local_blocks=1,
            num_init_blocks=0,
            layer_is_sparse=(False,) * 3 + (True,) * 57,
            layer_is_moe=(False,) * 3 + (True,) * 57,
        ),
        vision=VisionConfig(
            hidden_size=1280,
            intermediate_size=5120,
            num_layers=32,
            num_heads=16,
            num_channels=3,
            patch_size=14,
            temporal_patch_size=2,
            spatial_merge_size=2,
            layer_norm_eps=1e-5,
            rope_theta=10000.0,
            segment_max_temporal_patches=4,
            projector_hidden_size=6144,
        ),
        image_token_id=200025,
        video_token_id=200026,
    )


def test_the_released_model_has_the_released_tensors(read, values):
    found = parameters(read(values), Shard())
    pieces = [piece for parameter in found for piece in parameter.pieces]
    assert len(pieces) == len({piece.name for piece in pieces}) == 23_416
    assert sum(torch.Size(piece.shape).numel() for piece in pieces) == 427_040_140_160
    assert sum(torch.Size(p.shape).numel() for p in found) == 427_040_140_160
    assert sum(torch.Size(p.shape).numel() for p in found if p.dtype == torch.float32) == 46_339_200


def test_the_cache_of_the_released_model(read, values):
    config = read(values)
    assert cache_spec(config, torch.bfloat16).bytes_per_page == 128 * 137_472
    assert cache_spec(config, torch.bfloat16, Shard(1, 4)).bytes_per_page == 128 * 45_312
    assert cache_spec(config, torch.bfloat16, Shard(7, 8)).bytes_per_page == 128 * 45_312


def test_resaved_spellings_mean_the_same(read, values):
    assert read(resaved(copy.deepcopy(values))) == read(values)


def test_a_file_that_the_reference_saved(tmp_path):
    tiny_config(block_size=16, topk_blocks=4, num_local_blocks=2).save_pretrained(tmp_path)
    text = M3Config.from_file(tmp_path).text
    assert (text.block_size, text.topk_blocks, text.num_local_blocks, text.num_init_blocks) == (16, 4, 2, 0)
    assert text.layer_is_sparse == text.layer_is_moe == (False, True, True)
    assert (text.rotary_dim, text.rope_theta, text.swiglu_beta) == (8, 5e6, 1.0)


def test_forced_blocks_given_in_tokens(read, values):
    sparse = values["text_config"]["sparse_attention_config"]
    del sparse["sparse_local_block"], sparse["sparse_init_block"]
    sparse |= {"sparse_local_tokens": 200, "sparse_init_tokens": 130}
    text = read(values).text
    assert (text.num_local_blocks, text.num_init_blocks) == (3, 2)


def test_a_text_only_checkpoint(read, values):
    del values["vision_config"]
    assert read(values).vision is None


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "attention_output_gate", True),
        ("text_config", "scoring_func", "softmax"),
        ("text_config", "use_gemma_norm", False),
        ("text_config", "use_qk_norm", False),
        ("text_config", "qk_norm_type", "full"),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "use_routing_bias", False),
        ("text_config", "n_shared_experts", 2),
        ("text_config", "tie_word_embeddings", True),
        ("text_config", "model_type", "llama"),
        (None, "model_type", "llama"),
        (None, "tie_word_embeddings", True),
        (None, "projector_hidden_act", "relu"),
        ("vision_config", "patch_size", 16),
        ("vision_config", "hidden_act", "quick_gelu"),
        ("vision_config", "rope_mode", "2d"),
        ("vision_config", "spatial_merge_size", 1),
    ],
)
def test_what_is_not_supported_is_refused_by_name(read, values, section, key, value):
    (values[section] if section else values)[key] = value
    with pytest.raises(ConfigError, match=rf"{section + '.' if section else ''}{key}: .*{value}.* is not supported"):
        read(values)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_rope_is_refused_by_name(read, values, key):
    values["text_config"][key] = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e6}
    with pytest.raises(ConfigError, match=f"text_config.{key}.rope_type: 'yarn' is not supported"):
        read(values)


RELEASED_QUANTIZATION = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [1, 32],
    "ignored_layers": [
        "lm_head",
        "model.embed_tokens",
        "vision_tower",
        "multi_modal_projector",
        "patch_merge_mlp",
        *(f"language_model.model.layers.{layer}.block_sparse_moe.gate" for layer in range(3, 60)),
    ],
}


@pytest.mark.parametrize("section", [None, "text_config"])
def test_the_quantised_release_has_the_released_tensors(read, values, section):
    (values[section] if section else values)["quantization_config"] = RELEASED_QUANTIZATION
    found = parameters(read(values), Shard())
    pieces = [(piece, parameter) for parameter in found for piece in parameter.stored]
    assert len({piece.name for piece, _ in pieces}) == len(pieces) == 45_838
    num_bytes = sum(torch.Size(piece.shape).numel() * (p.dtype or torch.bfloat16).itemsize for piece, p in pieces)
    assert num_bytes == 443_742_085_120


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"quant_method": "fp8"}, "quant_method: 'fp8' is not supported"),
        ({"quant_method": None}, "quant_method: is missing"),
        ({"weight_block_size": [128, 128]}, "weight_block_size: .128, 128. is not supported"),
        ({"activation_scheme": "static"}, "activation_scheme: 'static' is not supported"),
        ({"ignored_layers": "lm_head"}, "ignored_layers: must be a list of names"),
        ({"ignored_layers": [3]}, "ignored_layers: must be a list of names"),
        ({"quantized_layers": {}}, "quantized_layers: is not supported"),
    ],
)
def test_other_quantisations_are_refused_by_name(read, values, change, complaint):
    values["quantization_config"] = RELEASED_QUANTIZATION | change
    with pytest.raises(ConfigError, match=f"quantization_config.{complaint}"):
        read(values)


def test_two_quantisations_that_contradict_each_other_are_refused(read, values):
    values["quantization_config"] = RELEASED_QUANTIZATION
    values["text_config"]["quantization_config"] = RELEASED_QUANTIZATION | {"ignored_layers": []}
    with pytest.raises(ConfigError, match=r"text_config.quantization_config: contradicts quantization_config"):
        read(values)


def test_without_sparse_attention_config_the_model_is_not_taken_for_a_dense_one(read, values):
    del values["text_config"]["sparse_attention_config"]
    with pytest.raises(ConfigError, match="sparse_attention_freq: is missing, and so is layer_types"):
        read(values)


def test_without_moe_layer_freq_no_layer_kind_is_guessed(read, values):
    del values["text_config"]["moe_layer_freq"]
    with pytest.raises(ConfigError, match=r"text_config\.moe_layer_freq: is missing, and so is mlp_layer_types"):
        read(values)


def test_switched_off_sparse_attention_is_refused(read, values):
    values["text_config"]["sparse_attention_config"]["use_sparse_attention"] = False
    with pytest.raises(ConfigError, match="use_sparse_attention: False is not supported"):
        read(values)


def test_index_values_are_refused(read, values):
    values["text_config"]["sparse_attention_config"]["sparse_disable_index_value"][5] = 0
    with pytest.raises(ConfigError, match="sparse_disable_index_value"):
        read(values)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("layer_types", ["full_attention"] * 60, "contradicts layer_types"),
        ("layer_types", ["full_attention"] * 59, "list of 60 entries"),
        ("mlp_layer_types", ["expert"] * 60, "'expert' is not one of"),
        ("rotary_dim", 32, "contradicts partial_rotary_factor"),
        ("num_attention_heads", 63, "multiple of num_key_value_heads"),
        ("num_key_value_heads", 8, "as many as num_key_value_heads"),
        ("num_experts_per_tok", 129, "exceeds the number of experts"),
        ("hidden_size", -1, "must be a whole number"),
        ("hidden_size", 6144.5, "must be a whole number"),
        ("hidden_size", True, "must be a whole number"),
        ("rms_norm_eps", "small", "must be a positive number"),
        ("rms_norm_eps", float("nan"), "must be a positive number"),
    ],
)
def test_contradictions_and_impossible_values(read, values, key, value, complaint):
    values["text_config"][key] = value
    with pytest.raises(ConfigError, match=complaint):
        read(values)


def test_all_faults_are_named_at_once(read, values):
    del values["text_config"]["head_dim"], values["vision_config"]["num_hidden_layers"], values["projector_hidden_size"]
    values["text_config"]["scoring_func"] = "softmax"
    with pytest.raises(ConfigError) as raised:
        read(values)
    for key in ("text_config.head_dim", "vision_config.num_hidden_layers", "projector_hidden_size", "text_config.scoring_func"):
        assert key in str(raised.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"text_config": 3}', "{}"])
def test_files_that_are_no_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError):
        M3Config.from_file(tmp_path)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        M3Config.from_file(tmp_path)
