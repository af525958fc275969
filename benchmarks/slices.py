"""Slices of MiniMax-M3: the released widths with a few layers and random weights, made on the device without any file.

Scales keep the variance of the residual stream near that of a trained model, so that activations stay finite, and router
scores are spread as independent tokens spread them.
"""

import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from server.kernels.mxfp8 import GROUP_SIZE
from server.model.config import RELEASED_DIR, M3Config
from server.model.m3 import M3Model
from server.model.shard import Alone, Collective, Shard
from server.model.weights import Parameter, parameters

RELEASED_CONFIG = RELEASED_DIR / "config.json"
LOGIT_STD = 3.0
_NORM_STD, _BIAS_STD = 0.1, 0.02
_E4M3_STD = 32.0  # far from both ends of the type
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_PER_LAYER = ("moe_layer_freq",)
_NOT_QUANTIZED = ("lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp")
_PER_SPARSE_LAYER = ("sparse_attention_freq", "sparse_disable_index_value")


@dataclass(frozen=True)
class Layers:
    """How many layers of each kind, dense ones first as in the released model."""

    num_dense: int
    num_sparse: int

    def __str__(self) -> str:
        return f"{self.num_dense} dense + {self.num_sparse} sparse"


def slice_values(path: Path, layers: Layers, *, quantized: bool = False, max_positions: int | None = None) -> dict[str, Any]:
    """`config.json` of a model as in `path`, cut to `layers`.

    Args:
        path: a config in the released spelling.
        layers: what to keep.
        quantized: as the MXFP8 release is.
        max_positions: the window, when it shall be another one.
    """
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text = values["text_config"]
    flags = [0] * layers.num_dense + [1] * layers.num_sparse
    text |= dict.fromkeys(_PER_LAYER, flags) | {"num_hidden_layers": len(flags)}
    text["sparse_attention_config"] |= dict.fromkeys(_PER_SPARSE_LAYER, flags)
    if max_positions is not None:
        text["max_position_embeddings"] = max_positions
    if quantized:
        routers = [
            f"language_model.model.layers.{layer}.block_sparse_moe.gate" for layer in range(layers.num_dense, len(flags))
        ]
        values["quantization_config"] = {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, GROUP_SIZE],
            "ignored_layers": [*_NOT_QUANTIZED, *routers],
        }
    return values


def read_values(values: Mapping[str, Any]) -> M3Config:
    """The configuration that a folder with these values as `config.json` has."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        return M3Config.from_file(Path(folder))


def std_of(name: str, shape: Sequence[int]) -> float:
    """Standard deviation of a parameter or a released tensor: projections keep the variance of what they multiply."""
    if name.endswith(("embed", "embed_tokens.weight")):
        return 1.0
    if name.endswith("bias"):
        return _BIAS_STD
    if len(shape) == 1:
        return _NORM_STD
    scale = LOGIT_STD if "lm_head" in name else 1.0
    fan_in = math.prod(shape[1:]) if len(shape) > 3 else shape[-1]  # a patch projection has its input in several dimensions
    return scale / math.sqrt(fan_in)


def random_tensor(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of a parameter or a released tensor: normal; e4m3 values with a spread of `_E4M3_STD`, and scales to match."""
    if dtype is torch.uint8:
        exponent = round(math.log2(std_of(name, (*shape[:-1], shape[-1] * GROUP_SIZE)) / _E4M3_STD))
        return torch.randint(126 + exponent, 129 + exponent, tuple(shape), dtype=torch.uint8, device=device)
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if dtype is not torch.float8_e4m3fn:
        return tensor.normal_(0.0, std_of(name, shape))
    for matrix in tensor if len(shape) > 2 else [tensor]:
        matrix.copy_(torch.empty(matrix.shape, dtype=torch.bfloat16, device=device).normal_(0.0, _E4M3_STD))
    return tensor


def random_weights(wanted: Sequence[Parameter], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights for all parameters, by name; `dtype` is the model's."""
    return {p.name: random_tensor(p.name, p.shape, p.dtype or dtype, device) for p in wanted}


class Slice:
    """A model of a few layers and its parts; parts share its weights.

    Attributes:
        config: of the whole slice, without a vision tower.
        layers: how many of each kind.
        parameters: of this rank.
    """

    def __init__(
        self,
        config_path: Path,
        layers: Layers,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard | None = None,
        *,
        quantized: bool = False,
        max_positions: int | None = None,
    ) -> None:
        """Make the weights of one rank; `dtype` is the model's, also with quantised weights."""
        values = slice_values(config_path, layers, quantized=quantized, max_positions=max_positions)
        self.config = replace(read_values(values), vision=None)
        self.layers = layers
        self.shard = shard or Shard()
        self.parameters = parameters(self.config, self.shard)
        self.weights = random_weights(self.parameters, device, dtype)
        self._models: dict[Layers, M3Model] = {}

    def part(self, layers: Layers) -> tuple[M3Config, dict[str, Tensor]]:
        """Configuration and weights of a model with fewer layers."""
        first_sparse = self.layers.num_dense
        kept = [*range(layers.num_dense), *range(first_sparse, first_sparse + layers.num_sparse)]
        weights = {}
        for name, tensor in self.weights.items():
            match = _LAYER.fullmatch(name)
            if match is None:
                weights[name] = tensor
            elif int(match[1]) in kept:
                weights[f"layers.{kept.index(int(match[1]))}.{match[2]}"] = tensor
        text = self.config.text
        is_sparse, is_moe = (tuple(kinds[i] for i in kept) for kinds in (text.layer_is_sparse, text.layer_is_moe))
        text = replace(text, num_layers=len(kept), layer_is_sparse=is_sparse, layer_is_moe=is_moe)
        return replace(self.config, text=text), weights

    def model(self, layers: Layers) -> M3Model:
        """A part of the slice, or all of it; sums over ranks are this rank's own share. Made once, as its tables take time."""
        if layers not in self._models:
            self._models[layers] = self.joined(layers, Alone())
        return self._models[layers]

    def joined(self, layers: Layers, collective: Collective) -> M3Model:
        """The same with a collective."""
        config, weights = self.part(layers)
        return M3Model(config, weights, collective)
