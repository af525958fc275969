"""Times the choice of tokens: `python -m benchmarks.sampling`.

Per way of sampling and batch size: what the kernels take on the GPU, in a CUDA graph over so many rows that none lies in the
second-level cache; what `launch` and `wait` take on the host while the device has nothing else to do; and what the PyTorch
twin takes, which sorts whole rows. "peaked" logits follow Zipf's law with exponent 1.5, "flat" ones are standard normal; both
are rounded to bfloat16, as the model's are. Prints a table and writes benchmarks/results/sampling-<device>.json.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.report import RESULTS, measured_with
from benchmarks.timing import limit_us, time_events, time_graph
from server.kernels.sampling import SamplingTable, SamplingWork, logprobs, sample_rows, sample_rows_torch
from server.kernels.sampling_adjust import Adjustments
from server.kernels.sampling_triton import SamplingWorkspace
from server.messages import SamplingParams
from server.model.sampler import Sampler
from server.model.sampling_slot import SamplingRow, work_of
from server.scheduler.plan import NewSequence

BATCHES = (1, 8, 64, 128)
VOCAB_SIZE = 200_064
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=9, temperature=0.0),
    "plain": SamplingParams(max_tokens=9),
    "top-k 40": SamplingParams(max_tokens=9, top_k=40),
    "top-p 0.95": SamplingParams(max_tokens=9, top_p=0.95),
    "top-k 40, top-p 0.95, min-p 0.05": SamplingParams(max_tokens=9, top_k=40, top_p=0.95, min_p=0.05),
    "plain, penalties": SamplingParams(max_tokens=9, frequency_penalty=0.5, repetition_penalty=1.1),
    "greedy, 20 log-probabilities": SamplingParams(max_tokens=9, temperature=0.0, num_logprobs=20),
}
_ROTATED_BYTES = 150 << 20
_HOST_REPEATS = 60


@dataclass(frozen=True)
class SamplingBenchRow:
    """Microseconds of one step's sampling.

    Attributes:
        kind: way of sampling, of all rows.
        logits: "peaked" or "flat".
        batch: rows.
        gpu_us, gpu_low_us, gpu_high_us: the kernels; median and middle 80 %.
        limit_us: one read of the logits.
        host_us: `launch` and `wait` on the host, the device being done before `wait`; the median.
        twin_us: the PyTorch twin, launched eagerly.
    """

    kind: str
    logits: str
    batch: int
    gpu_us: float
    gpu_low_us: float
    gpu_high_us: float
    limit_us: float
    host_us: float
    twin_us: float


def random_logits(shape: str, num_rows: int, vocab_size: int) -> Tensor:
    """[S, V] fp32."""
    rows = torch.randn((num_rows, vocab_size), device="cuda")
    if shape == "peaked":
        rows = -1.5 * (rows.argsort(dim=-1).argsort(dim=-1) + 1.0).log()
    return rows.bfloat16().float()


def admitted(params: SamplingParams, num_rows: int, vocab_size: int) -> Sampler:
    """A sampler whose slots all have these parameters."""
    sampler = Sampler(num_rows, vocab_size, torch.device("cuda"), base_seed=0)
    for slot in range(num_rows):
        sampler.admit(NewSequence(slot, f"request {slot}", list(range(1000)), 900, params, ()))
    return sampler


def time_launch(params: SamplingParams, logits: Tensor) -> float:
    """Median microseconds of the host."""
    num_rows = logits.shape[0]
    sampler, samples = admitted(params, num_rows, logits.shape[1]), []
    for position in range(1000, 1000 + _HOST_REPEATS):
        rows = [SamplingRow(slot, position) for slot in range(num_rows)]
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        pending = sampler.launch(logits, rows)
        launched_s = time.perf_counter()
        torch.cuda.synchronize()
        waited_s = time.perf_counter()
        pending.wait()
        samples.append(launched_s - started_s + time.perf_counter() - waited_s)
    return median(samples) * 1e6


class Kernels:
    """Calls of the kernels and of the twin, on tensors alone."""

    def __init__(self, params: SamplingParams, num_rows: int, vocab_size: int) -> None:
        device = torch.device("cuda")
        self._params = params
        self._table = SamplingTable.allocate(num_rows, device)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._table.floats[:] = torch.tensor([params.temperature, params.top_p, params.min_p, *penalties])
        self._slots = torch.arange(num_rows, device=device)
        is_penalised = penalties != (1.0, 0.0, 0.0)
        for column, values in enumerate((params.top_k, self._slots, self._slots if is_penalised else -1, -1)):
            self._table.ints[:, column] = values
        self._positions = torch.full_like(self._slots, 1000)
        self._workspace = SamplingWorkspace.allocate(num_rows, vocab_size, device)
        self._adjustments = self._penalties(num_rows, vocab_size, device) if is_penalised else None

    def _penalties(self, num_rows: int, vocab_size: int, device: torch.device) -> Adjustments:
        states = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)
        states[:, :900] = 1
        states[:, 900:1000] = 2
        masks = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        starts = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        return Adjustments(starts, starts, starts.float(), states, masks, torch.full_like(self._slots, -1), masks)

    def run(self, logits: Tensor, *, twin: bool = False) -> None:
        """Sample once."""
        out = torch.empty((2, logits.shape[0]), dtype=torch.int64, device=logits.device)
        where = (logits, self._table, self._slots, self._positions)
        if twin:
            sample_rows_torch(*where, out, self._adjustments)
        else:
            sample_rows(*where, work_of(self._params), out, self._workspace, self._adjustments)
        if self._params.num_logprobs is not None:
            logprobs(logits, out[0], self._params.num_logprobs)


def measure(kind: str, shape: str, num_rows: int, vocab_size: int) -> SamplingBenchRow:
    """One row of the table."""
    params = KINDS[kind]
    row_bytes = 4 * num_rows * vocab_size
    num_sets = max(2, min(64, -(-_ROTATED_BYTES // row_bytes)))
    sets = [random_logits(shape, num_rows, vocab_size) for _ in range(num_sets)]
    kernels = Kernels(params, num_rows, vocab_size)
    calls: list[Callable[[], None]] = [partial(kernels.run, logits) for logits in sets]
    timing = time_graph(calls, replays=10)
    twin = time_events(partial(kernels.run, sets[0], twin=True), repeats=5, budget_s=0.1)
    return SamplingBenchRow(
        kind=kind,
        logits=shape,
        batch=num_rows,
        gpu_us=round(timing.us, 1),
        gpu_low_us=round(timing.low_us, 1),
        gpu_high_us=round(timing.high_us, 1),
        limit_us=round(limit_us(row_bytes, 0), 2),
        host_us=round(time_launch(params, sets[0]), 1),
        twin_us=round(twin.us, 1),
    )


def measured_rows(batches: tuple[int, ...], vocab_size: int) -> Iterator[SamplingBenchRow]:
    """All rows; flat logits only where their shape matters."""
    for kind, params in KINDS.items():
        shapes = ("peaked", "flat") if work_of(params) == SamplingWork.FILTERED else ("flat",)
        for shape in shapes:
            for num_rows in batches:
                yield measure(kind, shape, num_rows, vocab_size)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Time the choice of tokens.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    folder = parser.parse_args().out
    device = torch.cuda.get_device_name()
    rows: list[SamplingBenchRow] = []
    result = {
        "device": device,
        "vocab_size": VOCAB_SIZE,
        **measured_with("python -m benchmarks.sampling"),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sampling-{device.lower().replace(' ', '-')}.json"
    print(f"{'rows of':32s} {'logits':7s} {'batch':>5s} {'GPU us':>9s} {'x limit':>8s} {'host us':>8s} {'twin us':>10s}")
    for row in measured_rows(BATCHES, VOCAB_SIZE):
        rows.append(row)
        limit = row.gpu_us / row.limit_us
        times = f"{row.gpu_us:9.1f} {limit:8.1f} {row.host_us:8.1f} {row.twin_us:10.1f}"
        print(f"{row.kind:32s} {row.logits:7s} {row.batch:5d} {times}", flush=True)
        path.write_text(json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
