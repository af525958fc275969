"""Make the tiny checkpoint in server/model/tiny: tokenizer, configuration and random weights, from nothing but this folder.

`python -m training.make_tiny [directory]` writes the same bytes every time. The chat template beside them is source text and
is not written here.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training.tiny_text import passages
from training.tiny_weights import make_weights

TINY_DIR = Path(__file__).resolve().parents[1] / "server" / "model" / "tiny"
NUM_BASE_TOKENS = 1300
VOCAB_SIZE = 1376  # rows of the embedding; a few more than there are tokens, as in the released model
TURN_START, TURN_END, UNKNOWN = "]~b]", "[e~[", "]!d~["
NUM_LAYERS, NUM_DENSE_LAYERS = 4, 1
TOKEN_COMPRESSION = {"image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2}

# M3's added tokens in the order of their ids.
ADDED_TOKENS = (
    "]!p~[ <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <reponame> <filename> <gh_stars> <issue_start> <issue_comment> "
    "<issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <empty_output> <commit_before> <commit_msg> "
    "<commit_after> ]~b] [e~[ ]!d~[ <function_call> <code_interpreter> ]<]speech[>[ ]<]image[>[ ]<]video[>[ "
    "]<]start_of_speech[>[ ]<]end_of_speech[>[ ]<]start_of_image[>[ ]<]end_of_image[>[ ]<]start_of_video[>[ "
    "]<]end_of_video[>[ ]<]vision_pad[>[ ]~!b[ <jupyter_error> <add_file> <delete_file> <rename_file> <edit_file> "
    "<commit_message> <empty_source_file> <repo_struct> <code_context> <file_content> <source_files> <pr_start> "
    "<review_comment> <filepath> <file_sep> <think> </think> <tool_call> </tool_call> ]<]frame[>[ ]<]start_of_frame[>[ "
    "]<]end_of_frame[>[ <|content_altered_placeholder|> ]<]minimax[>[ <mm:think> </mm:think>"
)
VISIBLE_TOKENS = frozenset(["<think>", "</think>", "<tool_call>", "</tool_call>", "]<]minimax[>[", "<mm:think>", "</mm:think>"])

# How text is cut before byte pairs are merged: words in which a lower-case run may follow capitals, with one leading
# sign or space; numbers of up to three digits; runs of signs; line ends; other space.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def added_tokens() -> list[AddedToken]:
    """M3's added tokens; all but the visible ones are special. Underscores inside `]<]...[>[` stand for spaces."""
    tokens = []
    for word in ADDED_TOKENS.split():
        text = word.replace("_", " ") if word.startswith("]<]") else word
        tokens.append(AddedToken(text, special=text not in VISIBLE_TOKENS, normalized=False))
    return tokens


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE over `tiny_text`, with M3's added tokens behind it.

    Raises:
        ValueError: the text is too small for the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BASE_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(passages(), trainer)
    if tokenizer.get_vocab_size() != NUM_BASE_TOKENS:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {NUM_BASE_TOKENS}")
    for token in added_tokens():  # one at a time: a mixed list would number the special ones first
        tokenizer.add_tokens([token])
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token that must exist."""
    found: int | None = tokenizer.token_to_id(text)
    if found is None:
        raise KeyError(text)
    return found


def text_config() -> dict[str, Any]:
    """The language model's part of config.json."""
    per_layer = [0] * NUM_DENSE_LAYERS + [1] * (NUM_LAYERS - NUM_DENSE_LAYERS)
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "attention_output_gate": False,
        "dense_intermediate_size": 256,
        "head_dim": 32,
        "hidden_act": "swigluoai",
        "hidden_size": 128,
        "intermediate_size": 64,
        "max_position_embeddings": 131072,
        "moe_layer_freq": per_layer,
        "n_shared_experts": 1,
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "partial_rotary_factor": 0.5,
        "qk_norm_type": "per_head",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 16,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 64,
        "sparse_attention_config": {
            "sparse_attention_freq": per_layer,
            "sparse_block_size": 128,
            "sparse_disable_index_value": per_layer,
            "sparse_index_dim": 32,
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_num_index_heads": 2,
            "sparse_score_type": "max",
            "sparse_topk_blocks": 16,
            "use_sparse_attention": True,
        },
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": VOCAB_SIZE,
    }


def vision_config() -> dict[str, Any]:
    """The vision tower's part of config.json."""
    return {
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": 64,
        "image_size": 2016,
        "img_token_compression_config": TOKEN_COMPRESSION,
        "intermediate_size": 128,
        "layer_norm_eps": 1e-05,
        "model_type": "clip_vision_model",
        "num_attention_heads": 4,
        "num_channels": 3,
        "num_hidden_layers": 2,
        "patch_size": 14,
        "position_embedding_type": "rope",
        "projection_dim": 128,
        "rope_mode": "3d",
        "rope_theta": 10000.0,
        "vision_segment_max_frames": 4,
    }


def make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json in the released spelling, with everything but the attention's block size and count scaled down."""
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "image_seq_length": 576,
        "image_token_index": token_id(tokenizer, "]<]image[>["),
        "img_token_compression_config": TOKEN_COMPRESSION,
        "model_type": "minimax_m3_vl",
        "multimodal_projector_bias": True,
        "process_image_mode": "dynamic_res",
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 128,
        "text_config": text_config(),
        "torch_dtype": "bfloat16",
        "video_token_index": token_id(tokenizer, "]<]video[>["),
        "vision_config": vision_config(),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def likely_ids(tokenizer: Tokenizer) -> list[int]:
    """Base tokens that are printable text by themselves, and the end of the turn."""
    texts = ((index, tokenizer.decode([index])) for index in range(NUM_BASE_TOKENS))
    printable = [index for index, text in texts if text.isascii() and all(char.isprintable() or char == "\n" for char in text)]
    return [*printable, token_id(tokenizer, TURN_END)]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` for people to read, the same way every time."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make_tiny(directory: Path) -> None:
    """Write every file of the checkpoint but the chat template into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    config = make_config(tokenizer)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    write_json(directory / "config.json", config)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": TURN_START,
            "eos_token": TURN_END,
            "unk_token": UNKNOWN,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["text_config"]["max_position_embeddings"],
        },
    )
    write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": token_id(tokenizer, TURN_START),
            "do_sample": True,
            "eos_token_id": token_id(tokenizer, TURN_END),
            "temperature": 1.0,
            "top_p": 0.95,
        },
    )
    weights = make_weights(config, likely_ids(tokenizer))
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


if __name__ == "__main__":
    make_tiny(Path(sys.argv[1]) if len(sys.argv) > 1 else TINY_DIR)
