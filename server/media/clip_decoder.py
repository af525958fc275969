"""The chosen frames of a clip for as little decoding as gives exactly those pixels.

Three savings, none of which changes a pixel: a group of pictures (a keyframe and what follows up to the next one) without a
chosen frame is not decoded at all; inside a group decoding stops at its last chosen frame; before that, frames that no other
frame refers to are skipped unless they are chosen. Frames before a group's keyframe in display order refer to the group
before, so that one is decoded to its end when such a frame is chosen. Containers may call a frame a keyframe that is none;
then a chosen frame does not come out, and everything is decoded from the start for those that are missing.
"""

from collections.abc import Callable, Iterator

import av
from av.video.stream import VideoStream

from server.errors import MediaError
from server.media.container import ClipIndex


class ClipDecoder:
    """Decodes one clip.

    Args:
        stream: whose decoder to use.
        index: its packets.
        is_cancelled: asked before every packet.
    """

    def __init__(self, stream: VideoStream, index: ClipIndex, is_cancelled: Callable[[], bool]) -> None:
        self._context = stream.codec_context
        self._index = index
        self._is_cancelled = is_cancelled
        self._num_shown = 0

    def frames(self, wanted: set[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Every wanted frame that can be decoded, once, with its stamp; damaged ones are left out.

        Raises:
            MediaError: cancelled.
        """
        packets = self._index.packets
        missing = set(wanted)
        plan = spans(packets, wanted) if self._index.has_stamps else [(0, len(packets))]
        yield from self._decode(plan, missing, skips=self._index.has_stamps)
        if missing and plan != [(0, len(packets))]:
            self._restart()
            yield from self._decode([(0, len(packets))], missing, skips=False)

    def _decode(self, plan: list[tuple[int, int]], missing: set[int], *, skips: bool) -> Iterator[tuple[int, av.VideoFrame]]:
        """Decode the spans of `packets`, and take what comes out from `missing`."""
        wanted = frozenset(missing)
        for number, (start, end) in enumerate(plan):
            if number:
                self._restart()
            for packet in self._index.packets[start:end]:
                if self._is_cancelled():
                    raise MediaError("The request was cancelled.")
                self._context.skip_frame = "NONREF" if skips and packet.pts not in wanted else "DEFAULT"
                yield from self._taken(packet, missing)
            yield from self._taken(None, missing)
            if not missing:
                return

    def _taken(self, packet: av.Packet | None, missing: set[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        try:
            decoded = self._context.decode(packet)
        except (av.FFmpegError, EOFError):
            return
        for frame in decoded:
            stamp = frame.pts if self._index.has_stamps else self._num_shown
            self._num_shown += 1
            if stamp in missing and not frame.is_corrupt:
                missing.remove(stamp)
                yield stamp, frame

    def _restart(self) -> None:
        """Forget all frames, as after a seek."""
        self._context.flush_buffers()
        self._num_shown = 0


def spans(packets: list[av.Packet], wanted: set[int]) -> list[tuple[int, int]]:
    """Which stretches of `packets` to decode, as half-open ranges that begin at a keyframe (or at the start)."""
    starts = [0, *(number for number, packet in enumerate(packets) if packet.is_keyframe and number)]
    ends = [*starts[1:], len(packets)]
    needed: list[int | None] = [None] * len(starts)  # where decoding of each group may stop
    for group in reversed(range(len(starts))):
        chosen = [number for number in range(starts[group], ends[group]) if packets[number].pts in wanted]
        if chosen:
            needed[group] = max(needed[group] or 0, chosen[-1] + 1)
        if needed[group] is not None and group and _has_leading(packets, starts[group], chosen):
            needed[group - 1] = ends[group - 1]
    plan: list[tuple[int, int]] = []
    for group, stop in enumerate(needed):
        if stop is None:
            continue
        if plan and plan[-1][1] == starts[group]:
            plan[-1] = (plan[-1][0], stop)
        else:
            plan.append((starts[group], stop))
    return plan


def _has_leading(packets: list[av.Packet], start: int, chosen: list[int]) -> bool:
    key_pts = packets[start].pts
    return key_pts is None or any((packets[number].pts or 0) < key_pts for number in chosen)
