"""Bidirectional attention inside segments of patches, for the vision tower.

A picture is one segment; a clip is cut into segments of a few temporal patches; no patch sees another segment.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def segment_attention_torch(q: Tensor, k: Tensor, v: Tensor, segment_start: Tensor) -> Tensor:
    """Twin of `segment_attention`: one segment after the other."""
    out = torch.empty_like(q)
    bounds = segment_start.tolist()
    for begin, end in pairwise(bounds):
        query, key, value = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, n, D]
        out[begin:end] = scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)
    return out


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segment_start: Tensor) -> Tensor:
    """Attend inside each segment with scale 1 / sqrt(D).

    Args:
        q: [N, heads, D] after rotation.
        k: [N, heads, D] after rotation.
        v: [N, heads, D].
        segment_start: [S + 1] int32, prefix sums of segment lengths; the last entry is N.

    Returns:
        [N, heads, D].
    """
    return segment_attention_torch(q, k, v, segment_start)
