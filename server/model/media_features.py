"""Features of the pictures and clips of every slot, and the rows of a step that they fill.

Media are encoded in pieces: a picture is one, a clip has one for every attention segment of its frames, because segments do
not see each other. A piece is encoded when the first chunk that touches it comes, together with other pieces of the step, and
is let go when its last token was computed. So a step encodes no more than it has tokens, and one piece for every chunk, and a
long clip holds up others no longer than a long prompt does. A resumed sequence encodes again, unless the cache still has its
pieces: its pixels stay in the slab as long as it is open.
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.messages import MediaItem, MediaKind, SlabRef, TokenRange
from server.model.feature_cache import FeatureCache, FeatureKey
from server.model.frame_upload import FrameUpload
from server.scheduler.plan import Chunk

logger = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]
PixelReader = Callable[[SlabRef], Pixels]

PATCH_SIZE = 14
MERGED_PATCHES = 4
TEMPORAL_PATCH = 2
MAX_BATCH_TOKENS = 8192
"""Placeholders of the pieces that are encoded together; a larger piece is encoded alone."""


class MediaEncoder(Protocol):
    """The part of the model that is used here."""

    @property
    def media_segment_len(self) -> int:
        """Temporal patches of a clip that see each other."""

    def encode_media(self, items: Sequence[Tensor]) -> list[Tensor]:
        """Features [t * h * w / 4, hidden] of each item's frames [F, H, W, 3] uint8."""


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
class _Piece:
    """What is encoded as one.

    Attributes:
        key: its place in the cache.
        item: whose it is.
        first_frame, num_frames: which frames; the last piece of a clip may announce one frame more than there is.
        ranges: where its features go.
    """

    key: FeatureKey
    item: MediaItem
    first_frame: int
    num_frames: int
    ranges: tuple[TokenRange, ...]

    @property
    def end(self) -> int:
        """Position behind its last placeholder."""
        return self.ranges[-1].offset + self.ranges[-1].length

    @property
    def num_tokens(self) -> int:
        """Placeholders."""
        return sum(token_range.length for token_range in self.ranges)

    def is_touched_by(self, chunk: Chunk) -> bool:
        """Whether one of its placeholders is in the chunk."""
        end = chunk.start + chunk.num_tokens
        return any(part.offset < end and chunk.start < part.offset + part.length for part in self.ranges)


@dataclass
class _SlotMedia:
    pieces: tuple[_Piece, ...]
    end: int  # position behind the last placeholder of all pieces
    features: dict[FeatureKey, Tensor] = field(default_factory=dict)
    fault: Exception | None = None


class MediaFeatures:
    """Media state of all slots."""

    def __init__(self, encoder: MediaEncoder, read_pixels: PixelReader, device: torch.device, cache_bytes: int = 0) -> None:
        """Start empty.

        Args:
            encoder: the model.
            read_pixels: returns the bytes of a slab range; raises when the range was reused.
            device: of the features.
            cache_bytes: device memory for features that no slot needs at the moment.
        """
        self.cache = FeatureCache(cache_bytes)
        self._encoder = encoder
        self._read_pixels = read_pixels
        self._upload = FrameUpload(device)
        self._slots: dict[int, _SlotMedia] = {}

    def admit(self, slot: int, items: tuple[MediaItem, ...]) -> None:
        """Take a slot with the items of its sequence."""
        if items:
            pieces = [piece for item in items for piece in _pieces(item, self._encoder.media_segment_len)]
            ends = [part.offset + part.length for item in items for part in item.ranges]
            self._slots[slot] = _SlotMedia(tuple(pieces), max(ends, default=0))

    def release(self, slot: int) -> None:
        """Drop the slot's features; a slot that holds nothing is ignored."""
        self._slots.pop(slot, None)

    def forget(self, slot: int) -> None:
        """Encode the slot's items anew for whoever shows them next: its sequence failed, and their features may be why."""
        media = self._slots.get(slot)
        for piece in media.pieces if media else ():
            self.cache.drop(piece.key)

    def prepare(self, chunks: Iterable[Chunk]) -> bool:
        """Encode what the chunks touch and nobody has yet, in one batch; faults are kept for `rows_of`.

        The device has read all pixels when it returns, so that their ranges may be another request's from then on.

        Returns:
            Whether any of the chunks' sequences still has media to come, be they touched or not.

        Raises:
            torch.AcceleratorError: the device itself is at fault, and with it every sequence.
        """
        frames: dict[FeatureKey, Tensor] = {}
        wanted: list[tuple[_SlotMedia, _Piece]] = []
        has_media = False
        for chunk in chunks:
            media = self._media_ahead(chunk)
            if media is None:
                continue
            has_media = True
            for piece in media.pieces:
                if piece.key in media.features or not piece.is_touched_by(chunk):
                    continue
                features = self.cache.get(piece.key)
                if features is not None:
                    media.features[piece.key] = features
                    continue
                try:
                    if piece.key not in frames:
                        frames[piece.key] = self._frames(piece)
                    wanted.append((media, piece))
                except torch.AcceleratorError:
                    raise
                except Exception as error:
                    media.fault = _without_frames(error)
        if frames:
            try:
                self._upload.join()
                self._encode(frames, wanted)
            finally:
                self._upload.wait()
        return has_media

    def rows_of(self, chunk: Chunk) -> list[FeatureRows]:
        """What the chunk's placeholder tokens get instead of their embeddings; `prepare` was called with the chunk.

        Raises:
            MediaFeaturesError: an item does not fit its description, or could not be read or encoded.
        """
        media = self._media_ahead(chunk)
        if media is None:
            return []
        if media.fault is not None:
            raise MediaFeaturesError("a picture or clip has no features") from media.fault
        end = chunk.start + chunk.num_tokens
        found: list[FeatureRows] = []
        for piece in media.pieces:
            first_feature = 0
            for token_range in piece.ranges:
                begin = max(token_range.offset, chunk.start)
                stop = min(token_range.offset + token_range.length, end)
                if begin < stop:
                    skipped = first_feature + begin - token_range.offset
                    features = media.features[piece.key][skipped : skipped + stop - begin]
                    found.append(FeatureRows(begin - chunk.start, features))
                first_feature += token_range.length
        self._let_go(media, end)
        return found

    def _media_ahead(self, chunk: Chunk) -> _SlotMedia | None:
        """The slot's media while some are to come; None from then on, so that decoding after a long clip costs nothing."""
        media = self._slots.get(chunk.slot)
        return None if media is None or chunk.start >= media.end else media

    def _let_go(self, media: _SlotMedia, position: int) -> None:
        """Drop the features of pieces that end at or before `position`, unless a later piece shows the same."""
        needed = {piece.key for piece in media.pieces if piece.end > position}
        for key in [key for key in media.features if key not in needed]:
            del media.features[key]

    def _frames(self, piece: _Piece) -> Tensor:
        """Frames of a piece, [F, H, W, 3] uint8 on the device, on their way there."""
        item = piece.item
        num_pairs, rows, columns = item.grid_thw
        frame_bytes = rows * columns * PATCH_SIZE**2 * 3
        num_frames, rest = divmod(item.pixels.num_bytes, frame_bytes) if frame_bytes else (0, 1)
        expected = (1,) if item.kind is MediaKind.IMAGE else (2 * num_pairs - 1, 2 * num_pairs)
        num_tokens = sum(part.length for part in item.ranges)
        if rest or num_frames not in expected or num_tokens * MERGED_PATCHES != num_pairs * rows * columns:
            raise MediaFeaturesError(f"{item.pixels.num_bytes} bytes of pixels for the grid {item.grid_thw}")
        count = min(piece.num_frames, num_frames - piece.first_frame)
        pixels = self._read_pixels(item.pixels)
        if pixels.size != item.pixels.num_bytes:
            raise MediaFeaturesError(f"{pixels.size} bytes of pixels for the grid {item.grid_thw}")
        stretch = pixels[piece.first_frame * frame_bytes :][: count * frame_bytes]
        frames = torch.from_numpy(stretch.reshape(count, rows * PATCH_SIZE, columns * PATCH_SIZE, 3))
        return self._upload.start(frames)

    def _encode(self, frames: dict[FeatureKey, Tensor], wanted: list[tuple[_SlotMedia, _Piece]]) -> None:
        """Encode all `frames`, and hand the features to those who want them."""
        num_tokens = {piece.key: piece.num_tokens for _, piece in wanted}
        outcomes: dict[FeatureKey, Tensor | Exception] = {}
        for keys in _batches(frames, num_tokens):
            outcomes |= self._encode_batch({key: frames[key] for key in keys})
        for media, piece in wanted:
            features = outcomes[piece.key]
            if isinstance(features, Exception):
                media.fault = features
            elif features.shape[0] != piece.num_tokens:
                media.fault = MediaFeaturesError(f"{features.shape[0]} features for {piece.num_tokens} tokens")
            else:
                media.features[piece.key] = features
                self.cache.put(piece.key, features)

    def _encode_batch(self, frames: dict[FeatureKey, Tensor]) -> dict[FeatureKey, Tensor | Exception]:
        """Encode all `frames` together; one by one when that fails, to tell whose fault it is."""
        try:
            return dict(zip(frames, self._encoder.encode_media(list(frames.values())), strict=True))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if len(frames) == 1:
                return dict.fromkeys(frames, _without_frames(error))
        # Not in the handler: there, all that the failed attempt has computed would still be held.
        outcomes: dict[FeatureKey, Tensor | Exception] = {}
        for key, item in frames.items():
            outcomes |= self._encode_batch({key: item})
        return outcomes


def _without_frames(error: Exception) -> Exception:
    """The error, logged and without its traceback, which would hold on to the tensors of the failed attempt."""
    traceback.clear_frames(error.__traceback__)
    logger.warning("a picture or clip cannot be encoded", exc_info=error)
    return error.with_traceback(None)


def _batches(keys: Iterable[FeatureKey], num_tokens: Mapping[FeatureKey, int]) -> Iterator[list[FeatureKey]]:
    """Runs of keys of at most `MAX_BATCH_TOKENS` together, or of one key."""
    batch: list[FeatureKey] = []
    total = 0
    for key in keys:
        if batch and total + num_tokens[key] > MAX_BATCH_TOKENS:
            yield batch
            batch, total = [], 0
        batch.append(key)
        total += num_tokens[key]
    yield batch


def _pieces(item: MediaItem, segment_len: int) -> list[_Piece]:
    """The parts of an item that are encoded on their own."""
    if item.kind is MediaKind.IMAGE:
        return [_Piece(FeatureKey(item.content_hash, 0), item, 0, 1, item.ranges)]
    return [
        _Piece(
            FeatureKey(item.content_hash, number),
            item,
            start * TEMPORAL_PATCH,
            segment_len * TEMPORAL_PATCH,
            item.ranges[start : start + segment_len],
        )
        for number, start in enumerate(range(0, len(item.ranges), segment_len))
    ]
