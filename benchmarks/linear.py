"""Times the projections on one GPU: `python -m benchmarks.linear [--out FOLDER]`.

The projections of the released model and the shares that one of 8 tensor-parallel ranks holds, in bf16 and in MXFP8, beside
cuBLAS with bf16 weights. A row's limit is the traffic of weight, inputs and outputs or the products, whichever takes longer.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import RESULTS, measured_with
from benchmarks.timing import Timing, limit_us, time_events, time_graph
from server.kernels.linear import linear
from server.kernels.mxfp8 import GROUP_SIZE, Mxfp8Weight

SHAPES = {  # [outputs, inputs]
    "qkv": (9856, 6144),
    "out": (6144, 8192),
    "gate_up": (24576, 6144),
    "down": (6144, 12288),
    "shared gate_up": (6144, 6144),
    "shared down": (6144, 3072),
    "qkv / 8": (1536, 6144),
    "out / 8": (6144, 1024),
    "gate_up / 8": (3072, 6144),
    "down / 8": (6144, 1536),
}
TOKENS = (1, 4, 8, 16, 32, 64, 128, 2048, 8192)
_MAX_GRAPH_TOKENS = 128
_ROTATED_BYTES = 300 << 20  # several times the second-level cache
_GRAPH_US = 1500


@dataclass(frozen=True)
class Row:
    """Microseconds of one product, with the middle 80 % of the samples."""

    what: str
    dtype: str
    tokens: int
    us: float
    low_us: float
    high_us: float
    limit_us: float


def _weights(num_rows: int, num_inputs: int, is_quantised: bool) -> list[Tensor | Mxfp8Weight]:
    """As many as no cache holds, at least two."""
    count = max(2, min(64, _ROTATED_BYTES // (num_rows * num_inputs * (1 if is_quantised else 2))))
    found: list[Tensor | Mxfp8Weight] = []
    for _ in range(count):
        weight = torch.randn((num_rows, num_inputs), device="cuda", dtype=torch.bfloat16)
        if is_quantised:
            scales = torch.randint(118, 122, (num_rows, num_inputs // GROUP_SIZE), device="cuda", dtype=torch.uint8)
            found.append(Mxfp8Weight((weight * 64).clamp(-448, 448).to(torch.float8_e4m3fn), scales))
        else:
            found.append(weight)
    return found


def _time(
    call: Callable[[Tensor | Mxfp8Weight], object], weights: list[Tensor | Mxfp8Weight], limit: float, tokens: int
) -> Timing:
    if tokens > _MAX_GRAPH_TOKENS:
        return time_events(lambda: call(weights[0]), repeats=10)
    rounds = max(1, math.ceil(_GRAPH_US / (len(weights) * max(limit, 2))))
    return time_graph([partial(call, weight) for weight in weights] * rounds, replays=10)


def rows_of(what: str) -> Iterator[Row]:
    """All rows of one projection."""
    num_rows, num_inputs = SHAPES[what]
    for dtype, bytes_per_weight in (("bf16", 2), ("mxfp8", 1 + 1 / GROUP_SIZE)):
        weights = _weights(num_rows, num_inputs, dtype == "mxfp8")
        for tokens in TOKENS:
            x = torch.randn((tokens, num_inputs), device="cuda", dtype=torch.bfloat16)
            num_bytes = num_rows * num_inputs * bytes_per_weight + 2 * tokens * (num_rows + num_inputs)
            limit = limit_us(num_bytes, 2 * tokens * num_rows * num_inputs)
            calls: dict[str, Callable[..., object]] = {dtype: partial(linear, x)}
            if dtype == "bf16":
                calls["bf16, cuBLAS"] = partial(torch.nn.functional.linear, x)
            for name, call in calls.items():
                timing = _time(call, weights, limit, tokens)
                us, low, high = (round(us, 2) for us in (timing.us, timing.low_us, timing.high_us))
                yield Row(what, name, tokens, us, low, high, round(limit, 3))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Time the projections against their physical limits.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    folder = parser.parse_args().out
    rows = []
    for what in SHAPES:
        for row in rows_of(what):
            rows.append(row)
            print(
                f"{row.what:16s} {row.dtype:13s} T {row.tokens:<6d} {row.us:9.2f} us  x{row.us / row.limit_us:.2f}", flush=True
            )
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    result = {
        "device": device,
        "method": "medians; up to 128 tokens in a CUDA graph over rotating weights, more with events after an L2 flush",
        **measured_with("python -m benchmarks.linear"),
        "rows": [asdict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"linear-{device.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
