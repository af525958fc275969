"""Rows of the step benchmark, the table, and the JSON file that grows row by row."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import measured_with


@dataclass(frozen=True)
class StepRow:
    """One measured step or part of a step; what does not apply is None.

    Attributes:
        part: of the benchmark, for `--only`.
        what: "sparse layer", "dense layer", "slice", "logits", ...
        dtype: of the weights: "bfloat16", "float32" or "mxfp8".
        shard: number of ranks that share the model.
        batch: sequences.
        context: tokens of each sequence after the step.
        num_tokens: query tokens of each sequence.
        layers: the slice that ran.
        us: median of the whole measurement, microseconds.
        low_us: lower end of the middle 80 % of samples.
        high_us: its upper end.
        us_per_layer: `us` over the layers it covers.
        limit_us_per_layer: see `limits`.
        x_limit: `us` over its limit.
        goal_us: what `us` should not exceed, where one was set.
        page_uses: see `StepCase`.
        distinct_experts: measured mean over the MoE layers; `limit_us` takes the expected one.
        gpu_busy_us: time of a step in which a kernel ran, from the profiler; pauses inside a graph are not in it.
        gpu_idle_share: 1 - `gpu_busy_us` / `us`.
        idle_between_steps: the share of a step through the loop that its parts, timed alone in this run, leave over: the
            slice, the logits and greedy sampling.
        cpu_us: processor time of the engine's thread in a step.
        host_us: time of a step that the engine's thread does not wait for the device.
        parts_us: what a projection is made of.
        mode: how it ran: "cuda graph", "eager", "host clock", "projection".
        error: why there is no number.
    """

    part: str
    what: str
    dtype: str
    shard: int = 1
    batch: int | None = None
    context: int | None = None
    num_tokens: int | None = None
    layers: str | None = None
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    us_per_layer: float | None = None
    limit_us_per_layer: float | None = None
    x_limit: float | None = None
    goal_us: float | None = None
    page_uses: float | None = None
    distinct_experts: float | None = None
    gpu_busy_us: float | None = None
    gpu_idle_share: float | None = None
    idle_between_steps: float | None = None
    cpu_us: float | None = None
    host_us: float | None = None
    parts_us: dict[str, float] | None = None
    mode: str | None = None
    error: str | None = None


HEADER = (
    f"{'after':>8}  {'part':8} {'what':34} {'dtype':9} {'batch':>5} {'context':>8} {'us':>11} {'us/layer':>10} {'x limit':>8} "
    f"{'idle':>6} {'between':>7} {'cpu us':>8} {'goal us':>9} mode"
)


def format_row(row: StepRow) -> str:
    """One line of the table."""
    if row.error is not None:
        return f"{row.part:8} {row.what:34} {row.dtype:9} {row.batch or '':>5} {row.context or '':>8} {row.error}"

    def cell(value: float | None, width: int, digits: int) -> str:
        return " " * width if value is None else f"{value:{width}.{digits}f}"

    times = f"{cell(row.us, 11, 1)} {cell(row.us_per_layer, 10, 1)} {cell(row.x_limit, 8, 2)}"
    shares = f"{cell(row.gpu_idle_share, 6, 3)} {cell(row.idle_between_steps, 7, 3)}"
    return (
        f"{row.part:8} {row.what:34} {row.dtype:9} {row.batch or '':>5} {row.context or '':>8} {times} {shares} "
        f"{cell(row.cpu_us, 8, 0)} {cell(row.goal_us, 9, 0)} {row.mode or ''}"
    )


class StepFile:
    """The JSON file: prints and keeps every row at once; rows of parts and types that are not measured again stay."""

    def __init__(self, path: Path, device: str, command: str) -> None:
        self._path = path
        self._device = device
        self._measured = measured_with(command)
        self._rows: list[StepRow] = []
        self._start_s = time.monotonic()

    @property
    def rows(self) -> Sequence[StepRow]:
        """Those of this run."""
        return self._rows

    def add(self, row: StepRow) -> None:
        """Print and write one more row."""
        self._rows.append(row)
        print(f"{time.monotonic() - self._start_s:6.1f} s  {format_row(row)}", flush=True)
        kept = json.loads(self._path.read_text()) if self._path.exists() else {"measured": {}, "rows": []}
        done = {_group(asdict(mine)) for mine in self._rows}
        rows = [other for other in kept["rows"] if _group(other) not in done]
        rows += [{key: value for key, value in asdict(mine).items() if value is not None} for mine in self._rows]
        result = {
            "device": self._device,
            "method": "medians; single layers by difference of slices; see docs/benchmarks.md",
            "measured": kept["measured"] | dict.fromkeys(sorted(done), self._measured),
            "rows": rows,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(result, indent=1) + "\n")


def _group(row: dict[str, object]) -> str:
    return f"{row['part']} {row['dtype']} shard {row['shard']}"
