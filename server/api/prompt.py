"""Prompts as token ids: with one placeholder per picture or clip, and expanded for the engine.

Knows the ids that media need; not the template, and not what is in the pictures.
"""

from collections.abc import Mapping, Sequence

import msgspec

from server.api.tokenizer import Tokenizer
from server.messages import MediaKind, TokenRange

TIMESTAMP = "]<]{:.1f} seconds[>["


class Tail(msgspec.Struct, frozen=True):
    """Ordinary text right before a placeholder, and how many ids it is; a time stamp behind it is encoded with it."""

    text: str
    num_tokens: int


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt with one placeholder per picture or clip.

    Attributes:
        token_ids: the whole prompt.
        media_positions: indices of the placeholders in `token_ids`, ascending.
        media_order: for each of them, which media part of the given messages it is, counted from 0. It is 0, 1, 2, ... unless
            tool results with media were put in another order.
        tails: for each of them, the ordinary text before it; empty for pictures.
    """

    token_ids: list[int]
    media_positions: tuple[int, ...] = ()
    media_order: tuple[int, ...] = ()
    tails: tuple[Tail, ...] = ()


class MediaLayout(msgspec.Struct, frozen=True):
    """How many placeholders an item needs.

    Attributes:
        kind: image or video.
        grid_thw: temporal patches, patch rows, patch columns.
        timestamps_s: of a clip, when each temporal patch begins; None when that is not known.
    """

    kind: MediaKind
    grid_thw: tuple[int, int, int]
    timestamps_s: tuple[float, ...] | None = None


class ExpandedPrompt(msgspec.Struct, frozen=True):
    """A prompt as the engine gets it.

    Attributes:
        token_ids: with as many placeholders as there are features.
        ranges: per item, in prompt order, where its features go: one range per temporal patch.
    """

    token_ids: list[int]
    ranges: tuple[tuple[TokenRange, ...], ...]


class MediaExpander:
    """Puts pictures and clips into prompts. Immutable.

    A clip is written like pictures, one per temporal patch, each behind its time stamp in ordinary text.
    """

    def __init__(
        self, tokenizer: Tokenizer, media_ids: Mapping[MediaKind, int], start_id: int, end_id: int, merge_size: int
    ) -> None:
        """Prepare the ids.

        Args:
            tokenizer: encodes time stamps.
            media_ids: the placeholder of each kind.
            start_id: the mark before placeholders.
            end_id: the mark behind them.
            merge_size: patches per feature, in height and in width.
        """
        self._tokenizer = tokenizer
        self._media_ids = dict(media_ids)
        self._start_id = start_id
        self._end_id = end_id
        self._merge_size = merge_size

    def expand(self, prompt: EncodedPrompt, items: Sequence[MediaLayout]) -> ExpandedPrompt:
        """See `ChatFormat.expand_media`."""
        token_ids: list[int] = []
        ranges: list[tuple[TokenRange, ...]] = []
        start = 0
        for position, tail, item in zip(prompt.media_positions, prompt.tails, items, strict=True):
            if prompt.token_ids[position] != self._media_ids[item.kind]:
                raise ValueError(f"item {len(ranges)} is a {item.kind}, and its placeholder is not")
            token_ids += prompt.token_ids[start:position]
            ranges.append(self._append(token_ids, tail, item))
            start = position + 1
        token_ids += prompt.token_ids[start:]
        return ExpandedPrompt(token_ids, tuple(ranges))

    def _append(self, token_ids: list[int], tail: Tail, item: MediaLayout) -> tuple[TokenRange, ...]:
        """Append an item's marks, placeholders and time stamps; returns where the placeholders are."""
        num_patches, height, width = item.grid_thw
        length = height * width // self._merge_size**2
        if item.timestamps_s is not None and len(item.timestamps_s) != num_patches:
            raise ValueError(f"{len(item.timestamps_s)} time stamps for {num_patches} temporal patches")
        ranges = []
        for index in range(num_patches):
            if item.timestamps_s is not None:
                before = tail if index == 0 else Tail("", 0)
                del token_ids[len(token_ids) - before.num_tokens :]
                token_ids += self._tokenizer.encode(before.text + TIMESTAMP.format(item.timestamps_s[index]))
            token_ids.append(self._start_id)
            ranges.append(TokenRange(len(token_ids), length))
            token_ids += [self._media_ids[item.kind]] * length
            token_ids.append(self._end_id)
        return tuple(ranges)
