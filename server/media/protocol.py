"""What the media pool and its worker processes say to each other over one socket pair: framed MessagePack, no pickle.

A frame is two little-endian uint64 lengths, a message, and a body of raw bytes (the encoded picture; empty for most). The
pool sends `Setup` once and then one task at a time; the worker answers `Hello` once and then every task exactly once.
"""

import struct

import msgspec

from server.media.geometry import ResizeRule, Size
from server.media.types import ImagePlan
from server.messages import SlabRef

HEADER = struct.Struct("<QQ")


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First message to a worker.

    Attributes:
        slab_name: path of the slab.
        memory_bytes: limit on the worker's private memory.
    """

    slab_name: str
    memory_bytes: int


class PlanTask(msgspec.Struct, frozen=True, tag="plan"):
    """Judge the body's headers; answered by `ImagePlan` or `Refused`."""

    rule: ResizeRule
    max_pixels: int


class FillTask(msgspec.Struct, frozen=True, tag="fill"):
    """Decode the body and write its patches of a picture of `size` to `ref`; answered by `Filled` or `Refused`."""

    size: Size
    max_pixels: int
    ref: SlabRef


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The worker is ready."""


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """The patches are in the slab."""


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
        resident_bytes: the worker's resident set; its allocator gives nothing back, so this is about its peak.
    """

    result: ImagePlan | Filled | Refused | Broken
    resident_bytes: int


Task = PlanTask | FillTask
ToWorker = Setup | PlanTask | FillTask
FromWorker = Hello | Answer
Outcome = ImagePlan | Filled
