"""What the engine writes into shared memory as it works, so that the front can tell a hanging engine from a busy one.

One writer, one reader, no lock: every field is one aligned 64-bit store. The memory outlives the engine, and reading it asks
nothing of it. Times are `time.monotonic_ns()`, which all processes of a machine share. Imports nothing of ours.
"""

import ctypes
import mmap
import os
import signal
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

# The engine answers it with the stacks of all its threads on stderr, and ends.
STACKS_SIGNAL: Final = signal.SIGUSR1

STEP_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
STEP_BUCKETS_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class _Memory(ctypes.Structure):
    """The fields; all zero at first."""

    beat_ns: int
    serving_since_ns: int
    step_since_ns: int
    num_bytes_to_load: int
    num_loaded_bytes: int
    steps_ns: int
    num_step_tokens: int

    _fields_ = (
        ("beat_ns", ctypes.c_int64),
        ("serving_since_ns", ctypes.c_int64),
        ("step_since_ns", ctypes.c_int64),
        ("num_bytes_to_load", ctypes.c_int64),
        ("num_loaded_bytes", ctypes.c_int64),
        ("steps_ns", ctypes.c_int64),
        ("num_step_tokens", ctypes.c_int64),
        ("steps_by_time", ctypes.c_int64 * (len(STEP_BUCKETS_S) + 1)),
        ("steps_by_tokens", ctypes.c_int64 * (len(STEP_BUCKETS_TOKENS) + 1)),
    )


@dataclass(frozen=True)
class Pulse:
    """The engine as its memory shows it at one moment.

    Attributes:
        is_serving: the loop has begun; before, the model is loaded and warmed up.
        age_s: time since the last sign of progress: a step that ended, or a look around with nothing to do. 0 before serving.
        num_bytes_to_load, num_loaded_bytes: of the weights; 0 before the sizes are known.
        step_seconds: time in which at least one step ran.
        idle_seconds: time since serving began in which none did.
        num_step_tokens: tokens computed in steps.
        steps_by_time, steps_by_tokens: steps per bucket of `STEP_BUCKETS_S` and `STEP_BUCKETS_TOKENS`, and beyond the last.
    """

    is_serving: bool
    age_s: float
    num_bytes_to_load: int
    num_loaded_bytes: int
    step_seconds: float
    idle_seconds: float
    num_step_tokens: int
    steps_by_time: tuple[int, ...]
    steps_by_tokens: tuple[int, ...]


class Heartbeat:
    """The memory, seen from either side.

    A step is *started* when it is handed to the device and *ended* when its result is back; several may be in between, and
    end in that order. A step that waits for the one before it takes no time meanwhile, so times of steps add up to the time
    in which the engine was busy.

    Attributes:
        fd: for the process at the other end; -1 for memory that nobody else sees.
    """

    def __init__(self, fd: int = -1, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Map the memory behind the descriptor `fd`, or new memory for this process alone."""
        self.fd = fd
        self._clock_ns = clock_ns
        self._memory = _Memory.from_buffer(mmap.mmap(fd, ctypes.sizeof(_Memory)))
        self._started_ns: deque[int] = deque()
        self._idle_ns = 0  # as the reader last told it

    @classmethod
    def shared(cls) -> "Heartbeat":
        """New memory that another process can map; it lives as long as a descriptor or a mapping of it."""
        fd = os.memfd_create("m3-heartbeat")
        os.truncate(fd, ctypes.sizeof(_Memory))
        return cls(fd)

    def close(self) -> None:
        """Close the descriptor; what is mapped stays readable. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def load_began(self, num_bytes: int) -> None:
        """Weights of that size are going to be read."""
        self._memory.num_loaded_bytes = 0
        self._memory.num_bytes_to_load = num_bytes

    def loaded(self, num_bytes: int) -> None:
        """That many more bytes are read."""
        self._memory.num_loaded_bytes += num_bytes

    def idle(self) -> None:
        """The loop has looked around, and there is nothing to do."""
        self._beat(self._clock_ns())

    def step_started(self) -> None:
        """A step is handed to the device."""
        now_ns = self._clock_ns()
        if not self._memory.serving_since_ns:
            self._beat(now_ns)
        if not self._started_ns:
            self._memory.step_since_ns = now_ns
        self._started_ns.append(now_ns)

    def step_ended(self, num_tokens: int) -> None:
        """The oldest step that was started is back, with or without a result."""
        now_ns = self._clock_ns()
        memory = self._memory
        self._started_ns.popleft()
        duration_ns = now_ns - memory.step_since_ns
        memory.step_since_ns = now_ns if self._started_ns else 0
        memory.steps_ns += duration_ns
        memory.num_step_tokens += num_tokens
        _count(memory.steps_by_time, STEP_BUCKETS_S, duration_ns / 1e9)
        _count(memory.steps_by_tokens, STEP_BUCKETS_TOKENS, num_tokens)
        self._beat(now_ns)

    def pulse(self) -> Pulse:
        """What the memory says now."""
        memory, now_ns = self._memory, self._clock_ns()
        serving_since_ns, step_since_ns, beat_ns = memory.serving_since_ns, memory.step_since_ns, memory.beat_ns
        busy_ns = memory.steps_ns + (now_ns - step_since_ns if step_since_ns else 0)
        if serving_since_ns:
            # A step that ends between two of these reads counts twice or not at all; a counter must not go back.
            self._idle_ns = max(self._idle_ns, now_ns - serving_since_ns - busy_ns)
        return Pulse(
            is_serving=serving_since_ns > 0,
            age_s=max(0, now_ns - beat_ns) / 1e9 if beat_ns else 0.0,
            num_bytes_to_load=memory.num_bytes_to_load,
            num_loaded_bytes=memory.num_loaded_bytes,
            step_seconds=memory.steps_ns / 1e9,
            idle_seconds=self._idle_ns / 1e9,
            num_step_tokens=memory.num_step_tokens,
            steps_by_time=tuple(memory.steps_by_time),
            steps_by_tokens=tuple(memory.steps_by_tokens),
        )

    @property
    def beat_ns(self) -> int:
        """When there was the last sign of progress; 0 before serving."""
        return self._memory.beat_ns

    def _beat(self, now_ns: int) -> None:
        self._memory.beat_ns = now_ns
        if not self._memory.serving_since_ns:
            self._memory.serving_since_ns = now_ns


def _count(counts: "ctypes.Array[ctypes.c_int64]", buckets: Sequence[float], value: float) -> None:
    """One more in the first bucket whose upper bound is not below `value`, or in the one beyond the last."""
    index = bisect_left(buckets, value)
    counts[index] = counts[index] + 1
