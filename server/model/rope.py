"""Rotary position tables: one axis for text, three axes (time, row, column) for patches.

All angles are computed in fp32, position times inverse frequency, because that is what the model was trained and is served
with; a more exact table would rotate far positions by other angles.
"""

import torch
from torch import Tensor

from server.model.config import TextConfig, VisionConfig


def inverse_frequencies(theta: float, dim: int) -> Tensor:
    """[dim / 2] fp32: theta^(-2 j / dim)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def text_cos_sin(config: TextConfig) -> Tensor:
    """[max_position_embeddings, rotary_dim] fp32 on the CPU: cosines in the first half of a row, sines in the second."""
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(config.rope_theta, config.rotary_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def patch_positions(grid_thw: tuple[int, int, int], merge: int, segment_len: int) -> Tensor:
    """Positions of all patches of one item, in merge-block order.

    Args:
        grid_thw: temporal patches, patch rows, patch columns.
        merge: side of a merge block; rows and columns are multiples of it.
        segment_len: temporal patches per attention segment; the temporal position restarts in each.

    Returns:
        [t * h * w, 3] int64: position in the segment, row, column.
    """
    num_frames, height, width = grid_thw
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width)[None, :].expand(height, width)
    plane = torch.stack((rows, columns), dim=-1)
    plane = plane.reshape(height // merge, merge, width // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
    times = (torch.arange(num_frames) % segment_len).repeat_interleave(height * width)
    return torch.cat((times[:, None], plane.repeat(num_frames, 1)), dim=-1)


def vision_cos_sin(config: VisionConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of patches at `positions` [N, 3]: each [N, 3 * axis / 2] fp32, axes one after the other.

    Each axis gets the same even number of dimensions, the largest that fits a third of a head; the rest is not rotated.
    """
    axis = 2 * (config.head_dim // 3 // 2)
    frequencies = inverse_frequencies(config.rope_theta, axis).to(positions.device, non_blocking=True)
    angles = (positions[..., None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the leading dimensions of [N, H, D] by [N, half] tables; fp32 inside, input dtype out."""
    half = cos.shape[-1]
    x = heads.float()
    low, high, passed = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, passed), dim=-1).to(heads.dtype)
