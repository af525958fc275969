"""The vision tower: frames to one feature per patch, of several pictures and clips at once.

A CLIP-like encoder with 3-D rotary positions and no norm after the last layer. Patches attend inside their segment only: a
picture is one segment, a clip is cut every few temporal patches, and the temporal position restarts in each.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from server.kernels.patchify import patch_grid, patchify
from server.kernels.vision_attention import segment_attention
from server.model.config import VisionConfig
from server.model.rope import patch_positions, rotate, vision_cos_sin


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
        patch = weights["vision.patch"]  # [hidden, 3, 2, 14, 14] fp32
        self._clip_patch = patch.flatten(1)
        # Both frames of a still's temporal patch are equal, so one copy with the sum of their weights gives the same.
        self._still_patch = patch.sum(2).flatten(1)
        self._pre_norm = weights["vision.pre_norm.weight"], weights["vision.pre_norm.bias"]
        self._layers = [VisionLayer(weights, f"vision.layers.{layer}", config) for layer in range(config.num_layers)]
        self._config = config

    def __call__(self, items: Sequence[Tensor]) -> Tensor:
        """Encode pictures and clips; they share the matrix products and do not see each other.

        Args:
            items: frames of each, [F, H, W, 3] uint8 RGB, H and W multiples of 28.

        Returns:
            [N, hidden] in the model dtype, N = the items' t * h * w together, each in merge-block order.
        """
        config = self._config
        x = torch.cat([self._projected(frames) for frames in items]).to(self._pre_norm[0].dtype)
        x = layer_norm(x, (config.hidden_size,), *self._pre_norm, config.layer_norm_eps)
        segment_len = config.segment_max_temporal_patches
        positions: list[Tensor] = []
        bounds = [0]
        for frames in items:
            grid = patch_grid(frames)
            positions.append(patch_positions(grid, config.spatial_merge_size, segment_len))
            num_pairs, height, width = grid
            start = bounds[-1]
            bounds += [
                start + min(end, num_pairs) * height * width for end in range(segment_len, num_pairs + segment_len, segment_len)
            ]
        cos, sin = vision_cos_sin(config, torch.cat(positions).to(x.device, non_blocking=True))
        segment_start = torch.tensor(bounds, dtype=torch.int32)
        for layer in self._layers:
            x = layer(x, cos, sin, segment_start)
        return x

    def _projected(self, frames: Tensor) -> Tensor:
        """[F, H, W, 3] uint8 to [t * h * w, hidden] fp32."""
        return linear(patchify(frames), self._still_patch if frames.shape[0] == 1 else self._clip_patch)
