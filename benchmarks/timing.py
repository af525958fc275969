"""Timing on a CUDA device: events around one call after flushing the L2 cache, or a CUDA graph over rotating inputs.

`time_host` is for steps on the CPU.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

HBM_BYTES_PER_S = 4.3e12  # measured copy rate of an H200, read + written
BF16_FLOPS_PER_S = 790e12  # measured rate of a large bf16 product on an H200
_FLUSH_BYTES = 256 << 20  # several times the L2
_HEAD_START_CYCLES = 3_000_000  # about 1.6 milliseconds in which the host enqueues, so that its launch time does not count


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median and the range of the middle 80 %."""

    us: float
    low_us: float
    high_us: float


def limit_us(num_bytes: float, flops: float) -> float:
    """Time that no kernel on this device can go below: memory traffic or matrix products, whichever takes longer."""
    return max(num_bytes / HBM_BYTES_PER_S, flops / BF16_FLOPS_PER_S) * 1e6


def summary(samples_us: Sequence[float]) -> Timing:
    """Median and middle 80 % of samples."""
    ordered = sorted(samples_us)
    tenth = len(ordered) // 10
    return Timing(median(ordered), ordered[tenth], ordered[-1 - tenth])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_events(call: Callable[[], object], *, repeats: int = 20, least: int = 5, budget_s: float = 0.6) -> Timing:
    """Time `call` with CUDA events, L2 flushed before each run; fewer repeats (at least `least`) when a run is long."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    call()
    torch.cuda.synchronize()
    samples: list[float] = []
    while len(samples) < repeats and (len(samples) < least or sum(samples) < budget_s * 1e6):
        start, end = _event(), _event()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return summary(samples)


def time_graph(calls: Sequence[Callable[[], object]], *, replays: int = 20) -> Timing:
    """Time one call of a CUDA graph that runs all `calls`, each on its own inputs so that none finds its data in L2."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    samples: list[float] = []
    for _ in range(replays):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return summary(samples)


def time_host(call: Callable[[], object], *, repeats: int = 5) -> Timing:
    """Time `call` by the host's clock, after one run that does not count."""
    call()
    samples = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start_s) * 1e6)
    return summary(samples)
