"""Decode steps through the engine's own loop: wall time, processor time, and how long the device has nothing to do.

The channel is scripted: it hands in all requests at once, and ends the loop when all are answered. A step counts when every
sequence got one token in it, the one before it did, too, and neither is among the first ones.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.limits import Chunk
from benchmarks.step_cases import pools_of
from benchmarks.step_parts import Bench
from benchmarks.step_report import StepRow
from benchmarks.timing import Timing, summary
from server.engine import Engine
from server.messages import Failed, Finished, FromEngine, SamplingParams, Shutdown, SlabRef, Submit, ToEngine, Tokens
from server.model.decode_graphs import CudaRecorder, Replay
from server.model.media_features import Pixels
from server.model.pending_step import PendingStep
from server.model.runner import ModelRunner
from server.scheduler.config import SchedulerConfig
from server.scheduler.plan import StepPlan, StepResult
from server.scheduler.scheduler import Scheduler

NUM_WARM = 8  # decode steps that do not count
STEP_TOKENS = 8192  # budget of a step


@dataclass(frozen=True)
class Mode:
    """How the loop runs."""

    name: str
    overlap: bool
    graphs: bool


MODES = (Mode("plain", False, False), Mode("plain, graphs", False, True), Mode("overlapped, graphs", True, True))


@dataclass(frozen=True)
class Mark:
    """The end of a step.

    Attributes:
        wall_s: when.
        cpu_s: processor time of the thread so far.
        waited_s: time it has waited for the device so far.
        num_tokens: what the step brought.
    """

    wall_s: float
    cpu_s: float
    waited_s: float
    num_tokens: int


class TimedStep:
    """A pending step whose waits are timed."""

    def __init__(self, step: PendingStep, runner: "TimedRunner") -> None:
        self._step = step
        self._runner = runner

    def wait(self) -> StepResult:
        """Wait for its end."""
        start_s = time.perf_counter()
        try:
            return self._step.wait()
        finally:
            self._runner.waited_s += time.perf_counter() - start_s


class TimedRunner:
    """A runner that adds up how long the loop waits for steps that it launched.

    Attributes:
        waited_s: so far.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.waited_s = 0.0

    def launch(self, plan: StepPlan) -> TimedStep:
        """Start a step."""
        return TimedStep(self._runner.launch(plan), self)


class ScriptedChannel:
    """The engine's channel: `submits`, then silence, then the end. Encodes what is sent, as the real one does."""

    def __init__(self, submits: Sequence[Submit], runner: TimedRunner) -> None:
        self._runner = runner
        self._encoder = msgspec.msgpack.Encoder()
        self._inbox: list[ToEngine] = list(submits)
        self._num_open = len(submits)
        self.marks: list[Mark] = []

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """What is there; never waits, because there is always something to do."""
        del timeout_s
        messages, self._inbox = self._inbox, []
        return messages if self._num_open else [Shutdown()]

    def send(self, events: Sequence[FromEngine]) -> None:
        """Note the end of a step.

        Raises:
            RuntimeError: a request failed.
        """
        self._encoder.encode(events)
        num_tokens = 0
        for event in events:
            match event:
                case Tokens():
                    num_tokens += len(event.token_ids)
                case Finished():
                    self._num_open -= 1
                case Failed():
                    raise RuntimeError(f"a request of the benchmark ended with {event}")
        if num_tokens:
            self.marks.append(Mark(time.perf_counter(), time.thread_time(), self._runner.waited_s, num_tokens))


def requests(batch: int, context: int, num_tokens: int, vocab_size: int) -> list[Submit]:
    """`batch` prompts of `context` random tokens that generate `num_tokens` greedily."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(vocab_size, (batch, context), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    return [Submit(f"request {i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def repeat(work: Callable[[], None]) -> Replay:
    """A graph without a GPU: `work` itself, run once before as a capture does."""
    work()
    return work


def no_pixels(ref: SlabRef) -> Pixels:
    """There are no pictures here."""
    raise RuntimeError(f"nobody sent {ref}")


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (begin, end) spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def steady(marks: Sequence[Mark], batch: int) -> list[tuple[Mark, Mark]]:
    """Consecutive steps, as pairs, in which every sequence got a token, without the first ones."""
    pairs = [(a, b) for a, b in itertools.pairwise(marks) if a.num_tokens == b.num_tokens == batch]
    return pairs[NUM_WARM:]


def serve(engine_of: Callable[[ScriptedChannel], Engine], submits: Sequence[Submit], runner: TimedRunner) -> list[Mark]:
    """Answer `submits`; the marks of all steps. The garbage collector waits, as it would add milliseconds to single steps."""
    channel = ScriptedChannel(submits, runner)
    gc.collect()
    gc.disable()
    try:
        engine_of(channel).run()
    finally:
        gc.enable()
    return channel.marks


def loop_row(bench: Bench, mode: Mode, batch: int, context: int, num_tokens: int) -> StepRow:
    """Time decode steps; on a GPU, then once more under the profiler for the time that kernels take."""
    common = {"batch": batch, "context": context, "num_tokens": 1, "layers": str(bench.layers)}
    what = f"step, {mode.name}"
    try:
        measured = _measure(bench, mode, batch, context, num_tokens)
    except Exception as error:
        return bench.failed("loop", what, error, **common)
    limit = bench.limits.limit_us(bench.layer_ids(bench.layers), [Chunk(context - 1, 1)] * batch)
    num_layers = bench.layers.num_dense + bench.layers.num_sparse
    row = bench.row("loop", what, measured.step, limit, num_layers, "host clock", **common)
    busy = measured.busy_us
    return replace(
        row,
        cpu_us=round(measured.cpu_us, 1),
        host_us=round(measured.host_us, 1),
        gpu_busy_us=None if busy is None else round(busy, 1),
        gpu_idle_share=None if busy is None else round(max(0.0, 1 - busy / measured.step.us), 4),
    )


@dataclass(frozen=True)
class _Measured:
    step: Timing
    cpu_us: float
    host_us: float
    busy_us: float | None


def _model_runner(bench: Bench, mode: Mode, batch: int, max_len: int) -> ModelRunner:
    runner = ModelRunner(
        bench.whole.model(bench.layers),
        pools_of(bench.pools, bench.layers),
        max_num_seqs=batch,
        max_model_len=max_len,
        vocab_size=bench.whole.config.text.vocab_size,
        read_pixels=no_pixels,
        base_seed=0,
    )
    if mode.graphs:
        runner.capture_graphs(CudaRecorder() if bench.pools.device.type == "cuda" else repeat)
    return runner


def _measure(bench: Bench, mode: Mode, batch: int, context: int, num_tokens: int) -> _Measured:
    pools, vocab_size, max_len = bench.pools, bench.whole.config.text.vocab_size, context + num_tokens
    runner = TimedRunner(_model_runner(bench, mode, batch, max_len))
    budget = max(batch, STEP_TOKENS)
    scheduler = Scheduler(SchedulerConfig(batch, budget, max_len, pools.page_size, pools.num_pages))

    def engine_of(channel: ScriptedChannel) -> Engine:
        return Engine(channel, scheduler, runner, vocab_size, overlap_steps=mode.overlap)  # type: ignore[arg-type]

    submits = requests(batch, context, num_tokens, vocab_size)
    serve(engine_of, submits, runner)  # compiles, and leaves the prompts in the prefix cache
    pairs = steady(serve(engine_of, submits, runner), batch)
    wall_s = [b.wall_s - a.wall_s for a, b in pairs]
    host_s = [wall - (b.waited_s - a.waited_s) for wall, (a, b) in zip(wall_s, pairs, strict=True)]
    busy = None
    if pools.device.type == "cuda":  # two lengths, so that prompts and first steps fall out of the difference
        half = num_tokens // 2
        long, short = (_busy_us(engine_of, requests(batch, context, n, vocab_size), runner) for n in (num_tokens, half))
        busy = (long - short) / (num_tokens - half)
    return _Measured(
        step=summary([wall * 1e6 for wall in wall_s]),
        cpu_us=mean(b.cpu_s - a.cpu_s for a, b in pairs) * 1e6,
        host_us=median(host_s) * 1e6,
        busy_us=busy,
    )


def _busy_us(engine_of: Callable[[ScriptedChannel], Engine], submits: Sequence[Submit], runner: TimedRunner) -> float:
    """Microseconds in which at least one kernel or copy ran while `submits` were answered."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as run:
        serve(engine_of, submits, runner)
    events = [event for event in run.events() or () if event.device_type.name == "CUDA"]
    return union_us((event.time_range.start, event.time_range.end) for event in events)


def loop_rows(
    bench: Bench, batches: Sequence[int], context: int, num_tokens: int, before: Sequence[StepRow]
) -> Iterator[StepRow]:
    """Every mode at every batch size; `before` are the rows of this run so far."""
    for batch in batches:
        for mode in MODES:
            yield with_idle(loop_row(bench, mode, batch, context, num_tokens), before)


def with_idle(row: StepRow, before: Sequence[StepRow]) -> StepRow:
    """The row with `idle_between_steps`, if all parts of such a step were measured before."""
    parts = (("decode", "slice", row.context), ("head", "logits", None), ("head", "sampling, greedy", None))
    found = [
        other.us
        for other in before
        if (other.part, other.what, other.context) in parts and other.batch == row.batch and other.us is not None
    ]
    if row.us is None or len(found) != len(parts):
        return row
    return replace(row, idle_between_steps=round(max(0.0, 1 - sum(found) / row.us), 4))
