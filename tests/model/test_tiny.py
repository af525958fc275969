import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from training.make_tiny import TINY_DIR, make_tiny

MADE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def config() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TINY_DIR / "config.json").read_text())
    return content


def shapes_and_dtypes() -> dict[str, tuple[list[int], str]]:
    with safe_open(TINY_DIR / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def test_script_makes_the_committed_files(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MADE)
    for name in MADE:
        assert (tmp_path / name).read_bytes() == (TINY_DIR / name).read_bytes(), name


def test_weights_are_small() -> None:
    assert (TINY_DIR / "model.safetensors").stat().st_size <= 4_000_000


def test_added_tokens_are_those_of_the_released_tokenizer_behind_the_base() -> None:
    entries = json.loads((TINY_DIR / "tokenizer.json").read_text())["added_tokens"]
    num_base = len(json.loads((TINY_DIR / "tokenizer.json").read_text())["model"]["vocab"])
    by_released_id = {entry["id"] - num_base + 200_000: entry["content"] for entry in entries}
    assert sorted(by_released_id) == list(range(200_000, 200_061))
    assert sum(entry["special"] for entry in entries) == 54
    assert {token_id: by_released_id[token_id] for token_id in (200_000, 200_019, 200_020, 200_021, 200_034)} == {
        200_000: "]!p~[",
        200_019: "]~b]",
        200_020: "[e~[",
        200_021: "]!d~[",
        200_034: "]~!b[",
    }
    assert [by_released_id[token_id] for token_id in range(200_024, 200_034)] == [
        f"]<]{name}[>["
        for name in (
            "speech",
            "image",
            "video",
            "start of speech",
            "end of speech",
            "start of image",
            "end of image",
            "start of video",
            "end of video",
            "vision pad",
        )
    ]
    assert [by_released_id[token_id] for token_id in range(200_050, 200_061)] == [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "]<]frame[>[",
        "]<]start of frame[>[",
        "]<]end of frame[>[",
        "<|content_altered_placeholder|>",
        "]<]minimax[>[",
        "<mm:think>",
        "</mm:think>",
    ]


def test_router_and_patch_embedding_are_float32_and_the_rest_bfloat16() -> None:
    for name, (_, dtype) in shapes_and_dtypes().items():
        wide = name.endswith(("block_sparse_moe.gate.weight", "e_score_correction_bias", "patch_embedding.weight"))
        assert dtype == ("F32" if wide else "BF16"), name


def test_ids_of_the_configuration_are_those_of_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(TINY_DIR / "tokenizer.json"))
    assert config()["image_token_index"] == tokenizer.token_to_id("]<]image[>[")
    assert config()["video_token_index"] == tokenizer.token_to_id("]<]video[>[")
    generation = json.loads((TINY_DIR / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.token_to_id("[e~[")
    assert tokenizer.get_vocab_size() < config()["text_config"]["vocab_size"]
    assert shapes_and_dtypes()["language_model.lm_head.weight"][0][0] == config()["text_config"]["vocab_size"]


def test_transformers_loads_it_and_samples_look_like_text() -> None:
    transformers = pytest.importorskip("transformers")
    model, report = transformers.MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        TINY_DIR, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    text = model.config.text_config
    assert text.layer_types == ["full_attention", *["minimax_m3_sparse"] * 3]
    assert text.mlp_layer_types == ["dense", *["sparse"] * 3]
    tokenizer = Tokenizer.from_file(str(TINY_DIR / "tokenizer.json"))
    ids = tokenizer.encode("What is the weather in Paris today? Think step by step.").ids
    with torch.inference_mode():
        probabilities = model(input_ids=torch.tensor([ids])).logits[0].float().softmax(-1)  # [T, vocab]
    added = [token_id for token_id in tokenizer.get_added_tokens_decoder() if token_id != tokenizer.token_to_id("[e~[")]
    assert probabilities[:, added].sum(-1).mean() < 0.01
    assert 0 < probabilities[:, tokenizer.token_to_id("[e~[")].mean() < 0.01
