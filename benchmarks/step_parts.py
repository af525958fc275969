"""Decode steps, prefill chunks and the model's head on slices: rows of the step benchmark.

A layer's time is a difference of slices that share their weights, one with more layers of its kind: `Bench.layers` less half of
its sparse ones, and dense layers alone. What one run reads is larger than the second-level cache.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.limits import LayerLimits
from benchmarks.routing import distinct_experts
from benchmarks.slices import Layers, Slice
from benchmarks.step_cases import StepCase, decode_case, pools_of, prefill_case
from benchmarks.step_report import StepRow
from benchmarks.timing import Timing, time_events, time_graph, time_host
from server.kvcache.pools import CachePools

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
_MS = 1000.0
GOALS_US = {  # of a slice of 1 dense and 5 sparse layers on one H200
    ("prefill", "bfloat16", 8192): 68 * _MS,
    ("prefill", "mxfp8", 8192): 72 * _MS,
    ("prompt", "bfloat16", 131072): 1650 * _MS,
    ("decode", "bfloat16", 8192): 1.20 * _MS,
    ("decode", "mxfp8", 8192): 0.70 * _MS,
}
_GOAL_SLICE = Layers(1, 5)


@dataclass(frozen=True)
class Bench:
    """What all parts share.

    Attributes:
        whole: the weights; they may have more dense layers than the slice that is named and timed as a whole.
        layers: that slice.
        dtype: as rows name it.
        pools: the cache of all layers that have weights.
        limits: of the whole slice's layers.
        use_graphs: capture decode steps; otherwise they run eagerly.
    """

    whole: Slice
    layers: Layers
    dtype: str
    pools: CachePools
    limits: LayerLimits
    use_graphs: bool

    def forward(self, layers: Layers, case: StepCase) -> Callable[[], object]:
        """The forward pass of a part of the slice."""
        model, pools = self.whole.model(layers), pools_of(self.pools, layers)
        return lambda: model.forward(case.token_ids, case.batch, pools)

    def limit_us(self, layers: Layers, case: StepCase, distinct: float | None = None) -> float:
        """Limit of the layers of a part of the slice in a step that touches `distinct` experts, see `limits`."""
        return self.limits.limit_us(self.layer_ids(layers), case.chunks, distinct)

    def layer_ids(self, layers: Layers) -> list[int]:
        """Where the layers of a part of the slice are among all that have weights."""
        first = self.whole.layers.num_dense
        return [*range(layers.num_dense), *range(first, first + layers.num_sparse)]

    def row(self, part: str, what: str, timing: Timing, limit: float, num_layers: int, mode: str, **more: object) -> StepRow:
        """A row whose times and limit cover `num_layers` layers."""
        return StepRow(
            part=part,
            what=what,
            dtype=self.dtype,
            shard=self.whole.shard.world,
            us=round(timing.us, 2),
            low_us=round(timing.low_us, 2),
            high_us=round(timing.high_us, 2),
            us_per_layer=round(timing.us / num_layers, 2),
            limit_us_per_layer=round(limit / num_layers, 3),
            x_limit=round(timing.us / limit, 3),
            mode=mode,
            **more,  # type: ignore[arg-type]
        )

    def failed(self, part: str, what: str, error: Exception, **more: object) -> StepRow:
        """A row that says why there is no number; the traceback goes to the log."""
        logger.warning("%s %s", part, what, exc_info=error)
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return StepRow(part=part, what=what, dtype=self.dtype, shard=self.whole.shard.world, error=text, **more)  # type: ignore[arg-type]


def time_decode(call: Callable[[], object], use_graph: bool) -> tuple[Timing, str]:
    """A decode step as serving runs it: replays of a CUDA graph; by the clock on a CPU."""
    if not torch.cuda.is_available():
        return time_host(call), "host clock"
    if not use_graph:
        return time_events(call, repeats=12), "eager"
    try:
        return time_graph([call], replays=12), "cuda graph"
    except RuntimeError:
        logger.warning("the step cannot be captured", exc_info=True)
        torch.cuda.synchronize()
        return time_events(call, repeats=12), "eager, cannot be captured"


def time_prefill(call: Callable[[], object], least: int = 3) -> tuple[Timing, str]:
    """Prefill steps run eagerly."""
    if not torch.cuda.is_available():
        return time_host(call, repeats=least), "host clock"
    return time_events(call, repeats=10, least=least), "eager"


def time_sampling(call: Callable[[], object]) -> tuple[Timing, str]:
    """Sampling runs eagerly; on a GPU the host has a head start."""
    if not torch.cuda.is_available():
        return time_host(call), "host clock"
    return time_events(call, repeats=12), "eager"


def _difference(more: Timing, less: Timing) -> Timing:
    """What `more` has on top; the ends are the worst cases."""
    return Timing(more.us - less.us, more.low_us - less.high_us, more.high_us - less.low_us)


def step_rows(
    bench: Bench, part: str, case: StepCase, time: Callable[[Callable[[], object]], tuple[Timing, str]]
) -> Iterator[StepRow]:
    """The whole slice, one sparse layer and one dense layer in a step."""
    batch, context, num_tokens = len(case.chunks), case.chunks[0].num_keys, case.chunks[0].num_tokens
    common: dict[str, object] = {"batch": batch, "context": context, "num_tokens": num_tokens}
    common |= {"page_uses": round(case.page_uses, 2), "layers": str(bench.layers)}
    whole, dense = bench.layers, bench.whole.layers.num_dense
    half = replace(whole, num_sparse=whole.num_sparse // 2)
    parts = {whole, half, Layers(dense, 0), Layers(dense // 2, 0)} - {Layers(0, 0)}
    try:
        timings = {layers: time(bench.forward(layers, case)) for layers in parts}
        distinct = distinct_experts(bench.whole, whole, case, pools_of(bench.pools, whole))
    except Exception as error:
        yield bench.failed(part, "slice", error, **common)
        return
    timing, mode = timings[whole]
    num_layers = whole.num_dense + whole.num_sparse
    is_named = whole == _GOAL_SLICE and batch == 1 and context in (num_tokens, PREFILL_TOKENS)
    goal = GOALS_US.get((part, bench.dtype, context)) if is_named and bench.whole.shard.world == 1 else None
    experts = {"distinct_experts": round(distinct, 1)}
    limit = bench.limit_us(whole, case, distinct)
    yield bench.row(part, "slice", timing, limit, num_layers, mode, goal_us=goal, **experts, **common)
    if half in timings:
        num_more = whole.num_sparse - half.num_sparse
        limit = bench.limit_us(Layers(0, num_more), case, distinct)
        difference = _difference(timing, timings[half][0])
        yield bench.row(part, "sparse layer", difference, limit, num_more, mode, **experts, **common)
    if dense >= 2:
        difference = _difference(timings[Layers(dense, 0)][0], timings[Layers(dense // 2, 0)][0])
        limit = bench.limit_us(Layers(dense - dense // 2, 0), case)
        yield bench.row(part, "dense layer", difference, limit, dense - dense // 2, mode, **common)


def decode_rows(bench: Bench, batches: list[int], contexts: list[int], most_tokens: int) -> Iterator[StepRow]:
    """Decode steps of all batch sizes and contexts, up to `most_tokens` tokens of context together."""
    text = bench.whole.config.text
    for context in contexts:
        for batch_size in batches:
            if batch_size * context <= most_tokens:
                case = decode_case(batch_size, context, bench.pools, text.vocab_size, text.max_position_embeddings)
                yield from step_rows(bench, "decode", case, lambda call: time_decode(call, bench.use_graphs))


def prefill_rows(bench: Bench, chunks: list[tuple[int, int]]) -> Iterator[StepRow]:
    """Prefill chunks, each (tokens before it, its tokens)."""
    for start, num_tokens in chunks:
        try:
            case = prefill_case(start, num_tokens, bench.pools, bench.whole.config.text.vocab_size)
        except ValueError as error:
            yield bench.failed("prefill", "slice", error, batch=1, context=start + num_tokens, num_tokens=num_tokens)
            continue
        yield from step_rows(bench, "prefill", case, time_prefill)


def prompt_row(bench: Bench, prompt_len: int, chunk: int) -> StepRow:
    """A whole prompt, chunk by chunk."""
    common = {"batch": 1, "context": prompt_len, "num_tokens": chunk, "layers": str(bench.layers)}
    what = f"slice, in chunks of {chunk}"
    try:
        vocab_size = bench.whole.config.text.vocab_size
        cases = [prefill_case(start, chunk, bench.pools, vocab_size) for start in range(0, prompt_len, chunk)]
        calls = [bench.forward(bench.layers, case) for case in cases]
        timing, mode = time_prefill(lambda: [call() for call in calls])
        limit = sum(bench.limit_us(bench.layers, case) for case in cases)
    except Exception as error:
        return bench.failed("prompt", what, error, **common)
    num_layers = bench.layers.num_dense + bench.layers.num_sparse
    is_named = bench.layers == _GOAL_SLICE and bench.whole.shard.world == 1
    goal = GOALS_US.get(("prompt", bench.dtype, prompt_len)) if is_named else None
    return bench.row("prompt", what, timing, limit, num_layers, mode, goal_us=goal, **common)
