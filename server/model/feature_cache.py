"""Encoder outputs that are worth keeping: a second turn about the same picture costs no encoding.

Keyed by content, bounded in bytes, the least recently used go first. Knows nothing of slots and requests; what a running
sequence holds is its own reference, whatever happens here.
"""

import logging
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class FeatureKey(NamedTuple):
    """What decides features: everything about the pixels, and which segment of a clip."""

    content_hash: bytes
    segment: int


class FeatureCache:
    """Features on the device, most recently used last.

    Attributes:
        num_hits, num_misses: of `get`.
        num_bytes: of what is held.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """`capacity_bytes` is a bound; 0 keeps nothing."""
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[FeatureKey, Tensor] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: FeatureKey) -> Tensor | None:
        """The features [n, hidden] of `key`, which become the most recently used."""
        features = self._entries.get(key)
        if features is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return features

    def put(self, key: FeatureKey, features: Tensor) -> None:
        """Keep a copy of `features`, unless it is larger than the whole cache or the device has no memory for it."""
        if features.nbytes > self._capacity_bytes or key in self._entries:
            return
        while self.num_bytes + features.nbytes > self._capacity_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.nbytes
        try:
            # A copy: a slice of a batch's output would keep the whole batch in memory.
            self._entries[key] = features.clone()
        except torch.OutOfMemoryError:
            logger.warning("no memory to keep %d bytes of encoded media for later requests", features.nbytes)
            return
        self.num_bytes += features.nbytes

    def drop(self, key: FeatureKey) -> None:
        """Let go of `key`, if it is held."""
        features = self._entries.pop(key, None)
        if features is not None:
            self.num_bytes -= features.nbytes
