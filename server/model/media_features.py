"""Features of the pictures and clips of every slot, and the rows of a step that they fill.

An item is encoded when the first chunk that touches it comes, and its features stay until the slot is released; a chunk may
begin or end anywhere inside it. A resumed sequence encodes again: its pixels stay in the slab as long as it is open.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.messages import MediaItem, MediaKind, SlabRef
from server.scheduler.plan import Chunk

Pixels = npt.NDArray[np.uint8]
PixelReader = Callable[[SlabRef], Pixels]

PATCH_SIZE = 14
MERGED_PATCHES = 4


class MediaEncoder(Protocol):
    """The part of the model that is used here."""

    def encode_media(self, pixels: Tensor, kind: MediaKind, grid_thw: tuple[int, int, int]) -> Tensor:
        """Features [t * h * w / 4, hidden]."""


class MediaFeaturesError(Exception):
    """An item's pixels or features do not fit its description."""


@dataclass(frozen=True)
class FeatureRows:
    """Features for some rows of a chunk.

    Attributes:
        first_row: row of the chunk that takes the first feature; the others follow.
        features: [n, hidden].
    """

    first_row: int
    features: Tensor


@dataclass(frozen=True)
class _SlotMedia:
    items: tuple[MediaItem, ...]
    features: dict[int, Tensor] = field(default_factory=dict)


class MediaFeatures:
    """Media state of all slots."""

    def __init__(self, encoder: MediaEncoder, read_pixels: PixelReader, device: torch.device) -> None:
        """`read_pixels` returns the bytes of a slab range; it raises when the range was reused."""
        self._encoder = encoder
        self._read_pixels = read_pixels
        self._device = device
        self._slots: dict[int, _SlotMedia] = {}

    def admit(self, slot: int, items: tuple[MediaItem, ...]) -> None:
        """Take a slot with the items of its sequence."""
        if items:
            self._slots[slot] = _SlotMedia(items)

    def release(self, slot: int) -> None:
        """Drop the slot's features; a slot that holds nothing is ignored."""
        self._slots.pop(slot, None)

    def rows_of(self, chunk: Chunk) -> list[FeatureRows]:
        """What the chunk's placeholder tokens get instead of their embeddings.

        Raises:
            MediaFeaturesError: the item does not fit its description; whatever `read_pixels` and the encoder raise passes.
        """
        media = self._slots.get(chunk.slot)
        if media is None:
            return []
        end = chunk.start + chunk.num_tokens
        found: list[FeatureRows] = []
        for i, item in enumerate(media.items):
            first_feature = 0
            for token_range in item.ranges:
                begin = max(token_range.offset, chunk.start)
                stop = min(token_range.offset + token_range.length, end)
                if begin < stop:
                    if i not in media.features:
                        media.features[i] = self._encode(item)
                    skipped = first_feature + begin - token_range.offset
                    found.append(FeatureRows(begin - chunk.start, media.features[i][skipped : skipped + stop - begin]))
                first_feature += token_range.length
        return found

    def _encode(self, item: MediaItem) -> Tensor:
        num_patches = math.prod(item.grid_thw)
        patch = (3, PATCH_SIZE, PATCH_SIZE) if item.kind is MediaKind.IMAGE else (3, 2, PATCH_SIZE, PATCH_SIZE)
        pixels = np.array(self._read_pixels(item.pixels))
        if pixels.size != num_patches * math.prod(patch):
            raise MediaFeaturesError(f"{pixels.size} bytes of pixels for the grid {item.grid_thw}")
        patches = torch.from_numpy(pixels.reshape(num_patches, *patch)).to(self._device)
        features = self._encoder.encode_media(patches, item.kind, item.grid_thw)
        num_tokens = sum(token_range.length for token_range in item.ranges)
        if features.shape[0] != num_tokens or num_tokens * MERGED_PATCHES != num_patches:
            raise MediaFeaturesError(f"{features.shape[0]} features and {num_tokens} tokens for the grid {item.grid_thw}")
        return features
