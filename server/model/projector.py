"""From patch features to token embeddings: project every patch, then merge each 2 x 2 block into one token."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import gelu, linear

from server.model.config import VisionConfig


class Projector:
    """Two GELU MLPs around the merge; the four patches of a merge block are consecutive rows."""

    def __init__(self, weights: Mapping[str, Tensor], config: VisionConfig) -> None:
        def affine(name: str) -> tuple[Tensor, Tensor]:
            return weights[f"projector.{name}.weight"], weights[f"projector.{name}.bias"]

        self._fc1, self._fc2 = affine("fc1"), affine("fc2")
        self._merge_fc1, self._merge_fc2 = affine("merge_fc1"), affine("merge_fc2")
        self._patches_per_token = config.spatial_merge_size**2

    def __call__(self, patches: Tensor) -> Tensor:
        """[N, vision hidden] to [N / 4, text hidden]."""
        projected = linear(gelu(linear(patches, *self._fc1)), *self._fc2)
        merged = projected.reshape(projected.shape[0] // self._patches_per_token, -1)
        return linear(gelu(linear(merged, *self._merge_fc1)), *self._merge_fc2)
