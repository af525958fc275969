"""The language model of a checkpoint folder as transformers saves it, for a peer that serves the same weights.

transformers needs torchvision for the whole model, whose processor it loads even for text.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from server.kernels.mxfp8 import Mxfp8Weight, dequantize_torch
from server.model.config import M3Config, TextConfig

_BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_UNWANTED = ("architectures", "sparse_attention_config", "moe_layer_freq", "rope_theta", "partial_rotary_factor", "hidden_act")


def write_text_folder(model_dir: Path, out: Path) -> None:
    """Convert the checkpoint in `model_dir`; MXFP8 weights become bf16."""
    out.mkdir(parents=True, exist_ok=True)
    config = M3Config.from_file(model_dir)
    save_file(dict(_saved(_Stored(model_dir), config.text)), out / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["text_config"]
    tokens = json.loads((model_dir / "generation_config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(_config(values, tokens, config.text), indent=1), encoding="utf-8")
    for name in _BESIDE:
        shutil.copy(model_dir / name, out / name)


def _config(values: Mapping[str, Any], tokens: Mapping[str, Any], text: TextConfig) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _UNWANTED} | {
        "architectures": ["MiniMaxM3VLForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "dtype": "bfloat16",
        "index_n_heads": text.index_num_heads,
        "index_head_dim": text.index_dim,
        "index_block_size": text.block_size,
        "index_topk_blocks": text.topk_blocks,
        "index_local_blocks": text.num_local_blocks,
        "layer_types": ["minimax_m3_sparse" if is_sparse else "full_attention" for is_sparse in text.layer_is_sparse],
        "mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in text.layer_is_moe],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": text.rope_theta,
            "partial_rotary_factor": text.rotary_dim / text.head_dim,
        },
        "bos_token_id": tokens["bos_token_id"],
        "eos_token_id": tokens["eos_token_id"],
    }


class _Stored:
    """The tensors of a folder by their released names, in their own type or, from MXFP8, in bf16."""

    def __init__(self, model_dir: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    def __call__(self, name: str) -> Tensor:
        """One tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        scales = f"{name}_scale_inv"
        if scales not in self._files:
            return tensor
        return dequantize_torch(Mxfp8Weight(tensor, self._files[scales].get_tensor(scales)), torch.bfloat16)


def _saved(stored: _Stored, text: TextConfig) -> Iterator[tuple[str, Tensor]]:
    root = "language_model.model"
    yield "lm_head.weight", stored("language_model.lm_head.weight")
    for name in ("embed_tokens", "norm"):
        yield f"model.{name}.weight", stored(f"{root}.{name}.weight")
    for layer in range(text.num_layers):
        released, saved = f"{root}.layers.{layer}", f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{saved}.{name}.weight", stored(f"{released}.{name}.weight")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            yield f"{saved}.self_attn.{name}.weight", stored(f"{released}.self_attn.{name}.weight")
        if text.layer_is_sparse[layer]:
            for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
                yield f"{saved}.self_attn.indexer.{name}.weight", stored(f"{released}.self_attn.index_{name}.weight")
        if text.layer_is_moe[layer]:
            yield from _saved_moe(stored, f"{released}.block_sparse_moe", f"{saved}.mlp", text.num_experts)
        else:
            yield from _saved_mlp(stored, f"{released}.mlp", f"{saved}.mlp")


def _saved_mlp(stored: _Stored, released: str, saved: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{saved}.gate_up_proj.weight", torch.cat([stored(f"{released}.{x}_proj.weight") for x in ("gate", "up")])
    yield f"{saved}.down_proj.weight", stored(f"{released}.down_proj.weight")


def _saved_moe(stored: _Stored, released: str, saved: str, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    experts = [f"{released}.experts.{e}" for e in range(num_experts)]
    yield f"{saved}.gate.weight", stored(f"{released}.gate.weight")
    yield f"{saved}.gate.e_score_correction_bias", stored(f"{released}.e_score_correction_bias")
    gate_up = [torch.cat([stored(f"{expert}.{x}.weight") for x in ("w1", "w3")]) for expert in experts]
    yield f"{saved}.experts.gate_up_proj", torch.stack(gate_up)
    yield f"{saved}.experts.down_proj", torch.stack([stored(f"{expert}.w2.weight") for expert in experts])
    yield from _saved_mlp(stored, f"{released}.shared_experts", f"{saved}.shared_experts")
