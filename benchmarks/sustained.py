"""What a GPU keeps up: `python -m benchmarks.sustained`. Limits of other benchmarks assume the rate of a short burst.

Times runs of bf16 products [8192, 8192] of normal and of zero numbers, back to back, with the lowest clock of the
multiprocessors and the highest power that the driver reported meanwhile (its figure for power lags behind), and writes
`results/sustained-<device>.json`. Needs `nvidia-ml-py`.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.report import RESULTS, measured_with

SIZE = 8192
RUNS = (5, 30, 150, 600, 2000)
_SAMPLE_S, _PAUSE_S = 0.02, 1.0


@dataclass(frozen=True)
class SustainedRow:
    """One run."""

    numbers: str
    num_products: int
    ms: float
    tflops: float
    min_sm_mhz: int
    max_watts: float


class Watch:
    """Samples clock and power until it is left."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, float]] = []
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._left.is_set():
            self.samples.append((torch.cuda.clock_rate(), torch.cuda.power_draw() / 1000))
            time.sleep(_SAMPLE_S)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()


def _time_ms(call: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def measure(numbers: str) -> list[SustainedRow]:
    """All runs with one kind of numbers; the GPU rests between them."""
    a = torch.zeros((SIZE, SIZE), dtype=torch.bfloat16, device="cuda")
    if numbers == "normal":
        a.normal_()
    out = torch.empty_like(a)
    _time_ms(lambda: torch.mm(a, a, out=out), 1)
    rows = []
    for count in RUNS:
        time.sleep(_PAUSE_S)
        with Watch() as watch:
            ms = _time_ms(lambda: torch.mm(a, a, out=out), count)
        clocks, watts = zip(*watch.samples, strict=True)
        tflops = count * 2 * SIZE**3 / ms / 1e9
        rows.append(SustainedRow(numbers, count, round(ms, 1), round(tflops, 1), min(clocks), round(max(watts))))
        print(f"{numbers:7s} {count:5d} products {ms:8.1f} ms {tflops:6.1f} TFLOP/s  {min(clocks)} MHz  {max(watts):.0f} W")
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Time products that follow each other for a while.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name()
    rows = [asdict(row) for numbers in ("normal", "zeros") for row in measure(numbers)]
    path = arguments.out / f"sustained-{device.lower().replace(' ', '-')}.json"
    result = {"device": device, **measured_with("python -m benchmarks.sustained"), "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
