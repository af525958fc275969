"""Times router and experts on one GPU: `python -m benchmarks.moe [--shards 1,8] [--dtypes bf16,mxfp8] [--tokens 1,...]`.

Geometry: hidden width 6,144, 128 experts of width 3,072 (TP1) or 384 (TP8), top-4, random weights, no shared expert; uniformly
random routings that touch the mean number of experts. Calls run in CUDA graphs over rotating routings; the touched weights are
far larger than the cache. Rows:
`moe_router`; `moe_sort` (sorting and gathering), `moe_up`, `moe_down`, `moe_combine` and their total `moe`; `moe_products` is
the sum of up and down, which is what the public kernel's figure holds. Without sorting (few tokens) `moe` is these two alone.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import RESULTS, Row, format_row, load_peers, make_row, write_json
from benchmarks.timing import Timing, limit_us, time_graph
from server.kernels.moe import moe, route
from server.kernels.moe_configs import few_configs, few_mxfp8_tiles, hopper_configs
from server.kernels.moe_few import few_down, few_gate_up
from server.kernels.moe_few_mxfp8 import few_down_mxfp8, few_gate_up_mxfp8
from server.kernels.moe_hopper import grouped_hopper
from server.kernels.moe_plan import ExpertPlan
from server.kernels.moe_rows import combine_rows, sort_rows
from server.kernels.moe_tiles import Activation, Weight
from server.kernels.mxfp8 import Mxfp8Weight

HIDDEN, WIDTH, NUM_EXPERTS, TOPK = 6144, 3072, 128, 4
TOKENS = (1, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
SKEWED_TOKENS = (2048, 8192)
SKEW = 0.65
"""Standard deviation of the logarithm of an expert's popularity: 64 tokens then touch 99 of 128, as on the slices of `step`."""
ACTIVATION, SCALING = Activation(1.702, 1.0, 7.0), 2.0
_GRAPH_BYTES, _MAX_SETS, _REPLAYS = 2 << 30, 16, 10


@dataclass(frozen=True)
class Case:
    """Weights, and one or several batches with routings of their own."""

    name: str
    w13: Weight
    w2: Weight
    batches: list[tuple[Tensor, Tensor, Tensor]]  # x [T, H], expert ids [T, k], weights [T, k]
    has_shared: bool = False

    @property
    def num_rows(self) -> int:
        """Pairs of token and expert."""
        ids = self.batches[0][1]
        return ids.numel() + self.has_shared * ids.shape[0]

    @property
    def is_mxfp8(self) -> bool:
        """The format of both weights."""
        return isinstance(self.w2, Mxfp8Weight)

    def limit_us(self, halves: int) -> float:
        """Limit of a product with `halves` times the expert's width: touched weights and rows once, or the arithmetic."""
        width, rows = halves * self.w2.shape[2], self.num_rows
        touched = sum(torch.unique(ids).numel() for _, ids, _ in self.batches) / len(self.batches) + self.has_shared
        bytes_of_weight = 1 + 1 / 32 if self.is_mxfp8 else 2.0
        num_bytes = touched * width * HIDDEN * bytes_of_weight + 2 * rows * (HIDDEN + self.w2.shape[2])
        return limit_us(num_bytes, 2 * rows * width * HIDDEN)


def random_weight(is_mxfp8: bool, *shape: int) -> Weight:
    """Normal weights, or random bytes without NaN and scales that leave activations finite."""
    if not is_mxfp8:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=shape[-1] ** -0.5)
    values = torch.randint(0, 0x70, shape, dtype=torch.uint8, device="cuda")
    values |= torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda") << 7
    scales = torch.randint(116, 119, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, device="cuda")
    return Mxfp8Weight(values.view(torch.float8_e4m3fn), scales)


def random_choices(num_tokens: int, num_experts: int, topk: int) -> Tensor:
    """Uniformly random choices [T, k] int32, of those that touch as many experts as such choices do on average."""
    mean = num_experts * (1 - (1 - topk / num_experts) ** num_tokens)
    while True:
        expert_ids = torch.rand((num_tokens, num_experts)).topk(topk).indices.int()
        if abs(torch.unique(expert_ids).numel() - mean) <= 0.5:
            return expert_ids


def skewed_choices(num_tokens: int, num_experts: int, topk: int) -> Tensor:
    """Choices [T, k] int32 without replacement among experts of log-normal popularity."""
    noise = -torch.empty((num_tokens, num_experts)).exponential_().log()
    return (SKEW * torch.randn(num_experts) + noise).topk(topk).indices.int()


def random_batch(num_tokens: int, choices: Callable[[int, int, int], Tensor] = random_choices) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, random choices and their weights."""
    x = torch.randn((num_tokens, HIDDEN), device="cuda").bfloat16()
    expert_ids = choices(num_tokens, NUM_EXPERTS, TOPK).cuda()
    return x, expert_ids, torch.rand((num_tokens, TOPK), device="cuda")


def _time(calls: Sequence[Callable[[], object]]) -> Timing:
    return time_graph(calls, replays=_REPLAYS)


def _whole(case: Case, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, ids, weights = batch
    a = ACTIVATION
    return moe(x, case.w13, case.w2, ids, weights, a.alpha, a.beta, a.limit, SCALING, case.has_shared)


def _sort(case: Case, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[ExpertPlan, Tensor]:
    x, ids, weights = batch
    first = hopper_configs(ids.numel() / NUM_EXPERTS, case.is_mxfp8)[0]
    return sort_rows(
        x, ids, weights, SCALING, NUM_EXPERTS, case.has_shared, first.step_rows, first.sizes[-1], permute=case.is_mxfp8
    )


def _few_products(case: Case, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Callable[[], object], Callable[[], object]] | None:
    """Both products without sorting; None where tokens are sorted."""
    (x, ids, weights), size = batch, (batch[0].shape[0], case.w2.shape[2])
    if isinstance(case.w13, Mxfp8Weight) and isinstance(case.w2, Mxfp8Weight):
        if tiles := few_mxfp8_tiles(*size):
            up = partial(few_gate_up_mxfp8, x, case.w13, ids, weights, ACTIVATION, SCALING, case.has_shared, tiles[0])
            return up, partial(few_down_mxfp8, up(), case.w2, tiles[1])
    elif configs := few_configs(*size):
        first = partial(few_gate_up, x, case.w13, ids, weights, ACTIVATION, SCALING, case.has_shared, configs[0])
        return first, partial(few_down, first(), case.w2, configs[1])
    return None


def case_rows(case: Case) -> Iterator[Row]:
    """All rows of one case but the router's."""
    limits = case.limit_us(2), case.limit_us(1)
    ups: list[Callable[[], object]] = []
    downs: list[Callable[[], object]] = []
    combines: list[Callable[[], object]] = []
    for batch in case.batches:
        few = _few_products(case, batch)
        if few:
            ups.append(few[0])
            downs.append(few[1])
        else:
            configs = hopper_configs(batch[1].numel() / NUM_EXPERTS, case.is_mxfp8)
            plan, rows = _sort(case, batch)
            first = partial(grouped_hopper, rows, case.w13, plan, ACTIVATION, configs[0])
            second = partial(grouped_hopper, first(), case.w2, plan, None, configs[1])
            ups.append(first)
            downs.append(second)
            combines.append(partial(combine_rows, second(), plan, TOPK, case.has_shared))
    up_time, down_time = _time(ups), _time(downs)
    yield make_row("moe_up", case.name, up_time, limits[0])
    yield make_row("moe_down", case.name, down_time, limits[1])
    both = Timing(*(a + b for a, b in zip(_numbers(up_time), _numbers(down_time), strict=True)))
    yield make_row("moe_products", case.name, both, sum(limits), ("moe_up", "moe_down"))
    includes, limit = ["moe_up", "moe_down"], sum(limits)
    if combines:
        moved = limit_us(2 * HIDDEN * (case.num_rows + case.batches[0][0].shape[0]), 0)
        yield make_row("moe_sort", case.name, _time([partial(_sort, case, b) for b in case.batches]), moved)
        yield make_row("moe_combine", case.name, _time(combines), moved)
        includes += ["moe_sort", "moe_combine"]
        limit += 2 * moved
    yield make_row("moe", case.name, _time([partial(_whole, case, b) for b in case.batches]), limit, includes)


def _numbers(timing: Timing) -> tuple[float, float, float]:
    return timing.us, timing.low_us, timing.high_us


def router_rows(tokens: Sequence[int]) -> Iterator[Row]:
    """The router, whose weight stays in the cache as other layers' weights would drive it out: both its bytes count."""
    weights = [torch.randn((NUM_EXPERTS, HIDDEN), device="cuda") / HIDDEN**0.5 for _ in range(64)]
    bias = torch.zeros(NUM_EXPERTS, device="cuda")
    for num_tokens in tokens:
        x = random_batch(num_tokens)[0]
        used = weights if num_tokens < 512 else weights[:4]
        timing = _time([partial(route, x, weight, bias, TOPK) for weight in used])
        limit = limit_us(4 * NUM_EXPERTS * HIDDEN + 2 * num_tokens * HIDDEN, 3 * 2 * num_tokens * NUM_EXPERTS * HIDDEN)
        yield make_row("moe_router", f"bf16 T{num_tokens}", timing, limit)


def rows_of(shards: Sequence[int], dtypes: Sequence[str], tokens: Sequence[int]) -> Iterator[Row]:
    """All rows."""
    yield from router_rows(tokens)
    for shard, dtype in itertools.product(shards, dtypes):
        is_mxfp8, width = dtype == "mxfp8", WIDTH // shard
        w13 = random_weight(is_mxfp8, NUM_EXPERTS + 1, 2 * width, HIDDEN)
        w2 = random_weight(is_mxfp8, NUM_EXPERTS + 1, HIDDEN, width)
        name = f"TP{shard} {dtype}"
        for num_tokens in tokens:
            touched = min(NUM_EXPERTS, num_tokens * TOPK) * 3 * width * HIDDEN * 2
            sets = max(1, min(_MAX_SETS, _GRAPH_BYTES // touched))
            batches = [random_batch(num_tokens) for _ in range(sets)]
            yield from case_rows(Case(f"{name} T{num_tokens}", w13[:NUM_EXPERTS], w2[:NUM_EXPERTS], batches))
            if num_tokens in SKEWED_TOKENS:
                batches = [random_batch(num_tokens, skewed_choices) for _ in range(sets)]
                yield from case_rows(Case(f"{name} skewed T{num_tokens}", w13, w2, batches, has_shared=True))
        del w13, w2
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Time router and experts against their physical limits.")
    parser.add_argument("--shards", default="1,8")
    parser.add_argument("--dtypes", default="bf16,mxfp8")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    shards, tokens = ([int(n) for n in text.split(",")] for text in (arguments.shards, arguments.tokens))
    peers = load_peers()
    rows = []
    for row in rows_of(shards, arguments.dtypes.split(","), tokens):
        rows.append(row)
        print(format_row(row, peers), flush=True)
    command = f"python -m benchmarks.moe --shards {arguments.shards} --dtypes {arguments.dtypes} --tokens {arguments.tokens}"
    print(f"wrote {write_json(rows, command, arguments.out, 'moe')}")


if __name__ == "__main__":
    main()
