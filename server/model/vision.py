"""The vision tower: uint8 patches to one feature per patch.

A CLIP-like encoder with 3-D rotary positions and no norm after the last layer. Patches attend inside their segment only: a
picture is one segment, a clip is cut every few temporal patches, and the temporal position restarts in each.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from server.kernels.vision_attention import segment_attention
from server.model.config import VisionConfig
from server.model.rope import patch_positions, rotate, vision_cos_sin

# CLIP's RGB statistics, for pixel values in [0, 1].
_PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
_PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


class VisionLayer:
    """A pre-norm encoder layer."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: VisionConfig) -> None:
        def affine(name: str) -> tuple[Tensor, Tensor]:
            return weights[f"{prefix}.{name}.weight"], weights[f"{prefix}.{name}.bias"]

        self._norm1, self._norm2 = affine("norm1"), affine("norm2")
        self._qkv, self._out = affine("qkv"), affine("out")
        self._fc1, self._fc2 = affine("fc1"), affine("fc2")
        self._config = config

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, segment_start: Tensor) -> Tensor:
        """[N, hidden] to [N, hidden]."""
        config = self._config
        normed = layer_norm(x, (config.hidden_size,), *self._norm1, config.layer_norm_eps)
        q, k, v = linear(normed, *self._qkv).view(-1, 3, config.num_heads, config.head_dim).unbind(1)
        attended = segment_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, segment_start)
        x = x + linear(attended.flatten(1), *self._out)
        normed = layer_norm(x, (config.hidden_size,), *self._norm2, config.layer_norm_eps)
        return x + linear(gelu(linear(normed, *self._fc1)), *self._fc2)


class VisionTower:
    """Patch projection and encoder."""

    def __init__(self, weights: Mapping[str, Tensor], config: VisionConfig) -> None:
        self._patch = weights["vision.patch"].flatten(1)  # [hidden, 3 * 2 * 14 * 14] fp32
        self._pre_norm = weights["vision.pre_norm.weight"], weights["vision.pre_norm.bias"]
        self._layers = [VisionLayer(weights, f"vision.layers.{layer}", config) for layer in range(config.num_layers)]
        self._config = config

    def __call__(self, pixels: Tensor, grid_thw: tuple[int, int, int]) -> Tensor:
        """Encode the patches of one picture or clip.

        Args:
            pixels: [N, 3, 14, 14] uint8 for a picture (both frames of its temporal patch are the same) or
                [N, 3, 2, 14, 14] for a clip, N = t * h * w, in merge-block order.
            grid_thw: temporal patches, patch rows, patch columns.

        Returns:
            [N, hidden] in the model dtype.
        """
        config = self._config
        x = linear(self._normalized(pixels), self._patch).to(self._pre_norm[0].dtype)
        x = layer_norm(x, (config.hidden_size,), *self._pre_norm, config.layer_norm_eps)
        segment_len = config.segment_max_temporal_patches
        positions = patch_positions(grid_thw, config.spatial_merge_size, segment_len)
        cos, sin = vision_cos_sin(config, positions.to(x.device))
        num_frames, height, width = grid_thw
        bounds = [*range(0, num_frames, segment_len), num_frames]
        segment_start = torch.tensor(bounds, dtype=torch.int32) * (height * width)
        for layer in self._layers:
            x = layer(x, cos, sin, segment_start)
        return x

    def _normalized(self, pixels: Tensor) -> Tensor:
        """uint8 patches to [N, 3 * 2 * 14 * 14] fp32 with CLIP's statistics."""
        if pixels.dim() == 4:
            pixels = pixels[:, :, None].expand(-1, -1, self._config.temporal_patch_size, -1, -1)
        mean = torch.tensor(_PIXEL_MEAN, device=pixels.device).view(3, 1, 1, 1) * 255.0
        std = torch.tensor(_PIXEL_STD, device=pixels.device).view(3, 1, 1, 1) * 255.0
        return ((pixels.float() - mean) / std).flatten(1)
