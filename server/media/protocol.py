"""What the media pool and its worker processes say to each other over one socket pair: framed MessagePack, no pickle.

A frame is two little-endian uint64 lengths, a message, and a body of raw bytes (the encoded item; empty for most). The
pool sends `Setup` once and then one task at a time; the worker answers `Hello` once and then every task exactly once.
`Cancel` may follow a task at any time and has no answer of its own.
"""

import struct

import msgspec

from server.media.geometry import ResizeRule, Size
from server.media.sampling import FrameSampling
from server.media.types import ClipLimits, ClipPlan, ImagePlan
from server.messages import SlabRef

HEADER = struct.Struct("<QQ")


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First message to a worker.

    Attributes:
        slab_name: path of the slab.
        memory_bytes: limit on the worker's private memory, beyond what it starts with.
    """

    slab_name: str
    memory_bytes: int


class PlanTask(msgspec.Struct, frozen=True, tag="plan"):
    """Judge the headers of the picture in the body; answered by `ImagePlan` or `Refused`."""

    rule: ResizeRule
    max_pixels: int


class PlanClipTask(msgspec.Struct, frozen=True, tag="plan_clip"):
    """Judge the clip in the body by its packets; answered by `ClipPlan` or `Refused`."""

    rule: ResizeRule
    sampling: FrameSampling
    limits: ClipLimits


class FillTask(msgspec.Struct, frozen=True, tag="fill"):
    """Decode the body and write its pixels at `size` to `ref`; answered by `Filled` or `Refused`."""

    size: Size
    max_pixels: int
    ref: SlabRef


class FillClipTask(msgspec.Struct, frozen=True, tag="fill_clip"):
    """Decode the frames `picks` of the body and write them at `size` to `ref`; answered by `Filled` or `Refused`."""

    size: Size
    picks: tuple[int, ...]
    max_frame_pixels: int
    ref: SlabRef


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The task that was sent before is not wanted any more; it may have ended already."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The worker is ready."""


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """The pixels are in the slab."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The item cannot be used; `message` is client-safe."""

    message: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The worker's own fault; `trace` is for the log."""

    trace: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """One answer to one task.

    Attributes:
        result: the outcome.
        grown_bytes: how much the worker's own resident memory has grown since its start; its allocator gives nothing back,
            so this is about its peak.
        cpu_s: processor time that the task took.
    """

    result: ImagePlan | ClipPlan | Filled | Refused | Broken
    grown_bytes: int
    cpu_s: float


Task = PlanTask | PlanClipTask | FillTask | FillClipTask
ToWorker = Setup | Cancel | PlanTask | PlanClipTask | FillTask | FillClipTask
FromWorker = Hello | Answer
Outcome = ImagePlan | ClipPlan | Filled
