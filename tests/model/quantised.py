"""Turns checkpoints into MXFP8 ones, under the names and with the settings of the released one."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from server.kernels.mxfp8 import dequantize_torch
from training.mxfp8 import quantize

RELEASED_IGNORED = ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp"]
_PROJECTIONS = re.compile(
    r"language_model\.model\.layers\.\d+\.(self_attn\.(index_)?[qkvo]_proj|(mlp|block_sparse_moe\.shared_experts)\.\w+_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123])\.weight"
)


def quantise_checkpoint(source: Path, mxfp8: Path, restored: Path, unquantised: str = "^$", ignored_layers=()) -> None:
    """Write `source` as MXFP8, and once more with what these numbers are in fp32.

    Args:
        source: a folder with `config.json` and `model.safetensors`.
        mxfp8: new folder.
        restored: new folder.
        unquantised: pattern of projections that stay as they are.
        ignored_layers: what the config says of them, beside what the released one says.
    """
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    quantised, restored_tensors = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if _PROJECTIONS.fullmatch(name) and not re.search(unquantised, name):
            weight = quantize(tensor)
            quantised |= {name: weight.values, f"{name}_scale_inv": weight.scales}
            restored_tensors[name] = dequantize_torch(weight, torch.float32)
    write_checkpoint(restored, config, restored_tensors)
    routers = [name.removesuffix(".weight") for name in tensors if name.endswith("block_sparse_moe.gate.weight")]
    settings = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    settings["ignored_layers"] = [*RELEASED_IGNORED, *routers, *ignored_layers]
    write_checkpoint(mxfp8, config | {"quantization_config": settings}, quantised)


def write_checkpoint(folder: Path, config, tensors) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
