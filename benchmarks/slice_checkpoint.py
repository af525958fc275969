"""Writes a slice with random weights as a checkpoint: `python -m benchmarks.slice_checkpoint FOLDER --layers 1+1 [--mxfp8]`.

The layout is the released one, so that this server and others load it. The tokenizer is the tiny checkpoint's, with names for
all other ids below the added tokens, which keep the released ids; the template is the tiny checkpoint's.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.slices import RELEASED_CONFIG, Layers, random_tensor, read_values, slice_values
from server.model.shard import Shard
from server.model.weights import Parameter, parameters
from training.make_tiny import ADDED_TOKENS, NUM_BASE_TOKENS, TINY_DIR, make_tokenizer

INDEX = "model.safetensors.index.json"


def write_checkpoint(folder: Path, values: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """Write all files.

    Args:
        folder: made when missing.
        values: `config.json`, as `slices.slice_values` cuts it.
        device: where values are drawn.
        dtype: of weights that have no type of their own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    weight_map: dict[str, str] = {}
    wanted = parameters(read_values(values), Shard())
    for number, group in enumerate(_by_layer(wanted), start=1):
        tensors = dict(_released(group, device, dtype))
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    _write_tokenizer(folder, values["image_token_index"] - ADDED_TOKENS.split().index("]<]image[>["))


def _by_layer(wanted: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    for _, group in groupby(wanted, key=lambda parameter: parameter.name.split(".")[:2]):
        yield list(group)


def _released(group: Sequence[Parameter], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for parameter in group:
        for piece in parameter.pieces:
            yield piece.name, random_tensor(piece.name, piece.shape, parameter.dtype or dtype, device).cpu()


def _write_tokenizer(folder: Path, num_base_tokens: int) -> None:
    """The tiny checkpoint's tokenizer with `num_base_tokens` ids before the added tokens, and the files beside it."""
    tokenizer = json.loads(make_tokenizer().to_str())
    shift = num_base_tokens - NUM_BASE_TOKENS
    tokenizer["model"]["vocab"] |= {f"\u0120w{index}": index for index in range(NUM_BASE_TOKENS, num_base_tokens)}
    for token in tokenizer["added_tokens"]:
        token["id"] += shift
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    generation = json.loads((TINY_DIR / "generation_config.json").read_text())
    generation |= {key: generation[key] + shift for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1), encoding="utf-8")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(TINY_DIR / name, folder / name)


def main() -> None:
    """Write a slice."""
    parser = argparse.ArgumentParser(description="Write a slice with random weights as a checkpoint folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", default="1+1", help="dense+sparse layers")
    parser.add_argument("--mxfp8", action="store_true", help="quantise as the MXFP8 release does")
    parser.add_argument("--config", type=Path, default=RELEASED_CONFIG, help="widths: a config.json in the released spelling")
    parser.add_argument("--vision-layers", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    num_dense, num_sparse = map(int, arguments.layers.split("+"))
    values = slice_values(arguments.config, Layers(num_dense, num_sparse), quantized=arguments.mxfp8)
    values["vision_config"]["num_hidden_layers"] = arguments.vision_layers
    write_checkpoint(arguments.folder, values, torch.device(arguments.device), torch.bfloat16)


if __name__ == "__main__":
    main()
