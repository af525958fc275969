"""Times the model's step on slices with random weights: `python -m benchmarks.step [--only decode,loop] [--quick] [--shard 8]`.

Prints microseconds per step and layer, the multiple of the physical limit (`benchmarks.limits`) and the engine loop's idle
share, and writes JSON row by row. `--device cpu` with a small `--config` is a dry run. How each number is taken:
docs/benchmarks.md.
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.limits import LayerLimits
from benchmarks.report import RESULTS
from benchmarks.slices import RELEASED_CONFIG, Layers, Slice
from benchmarks.step_cases import random_pools
from benchmarks.step_head import head_rows
from benchmarks.step_loop import loop_rows
from benchmarks.step_parts import Bench, decode_rows, prefill_rows, prompt_row
from benchmarks.step_projection import projections
from benchmarks.step_report import HEADER, StepFile, StepRow
from server.model.config import cache_spec
from server.model.shard import Shard

PARTS = ("prefill", "prompt", "decode", "head", "loop")
DENSE_LAYERS, DENSE_LAYERS_OF_SHARD = 2, 8  # half of them read more than the second-level cache holds
_K = 1024


def parse() -> argparse.Namespace:
    """The command line; sizes left out follow from --quick."""
    parser = argparse.ArgumentParser(description="Time the model's step on slices with random weights.")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--dtypes", default="bf16,mxfp8", help="of the weights: bf16, mxfp8, or fp32 on a CPU")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--shard", type=int, default=1, help="time the share of one of so many tensor-parallel ranks")
    parser.add_argument("--layers", default=None, help="dense+sparse layers, 1+5 if unset, 1+12 of a shard")
    parser.add_argument("--batches", default=None, help="of decode steps")
    parser.add_argument("--contexts", default=None, help="of decode steps, in tokens")
    parser.add_argument("--chunks", default=None, help="of prefill, as start:tokens")
    parser.add_argument("--prompt", type=int, default=128 * _K, help="tokens of the prompt that is computed in chunks")
    parser.add_argument("--prompt-chunk", type=int, default=8 * _K)
    parser.add_argument("--loop-batches", default="1,8,32")
    parser.add_argument("--loop-context", type=int, default=8 * _K)
    parser.add_argument("--loop-tokens", type=int, default=96, help="decode steps of a run through the loop")
    parser.add_argument("--max-tokens", type=int, default=16 << 20, help="skip decode steps with more context together")
    parser.add_argument("--pool-bytes", type=int, default=24 << 30, help="memory of the page pool")
    parser.add_argument("--config", type=Path, default=RELEASED_CONFIG, help="widths: a config.json in the released spelling")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="decode steps without CUDA graphs")
    parser.add_argument(
        "--all-reduce",
        type=Path,
        nargs="+",
        default=sorted(RESULTS.glob("all-reduce-*x-nvidia-h200.json")),
        help="times of benchmarks.all_reduce, for a projection with each of them",
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file; results/step-<device>[-shard<n>].json if unset")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.batches = arguments.batches or ("1,8,64" if quick else "1,4,8,16,32,64,128")
    arguments.contexts = arguments.contexts or ("1024,8192" if quick else "1024,8192,32768,131072,524288")
    arguments.chunks = arguments.chunks or ("0:8192" if quick else "0:2048,0:4096,0:8192,24576:8192,122880:8192,516096:8192")
    arguments.layers = arguments.layers or ("1+5" if arguments.shard == 1 else "1+12")
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def rows_of(arguments: argparse.Namespace, dtype_name: str, parts: set[str], done: Sequence[StepRow]) -> Iterator[StepRow]:
    """All rows of one type of weights; the caller appends each of them to `done`."""
    device = torch.device(arguments.device)
    contexts, chunks = _numbers(arguments.contexts), [tuple(map(int, c.split(":"))) for c in arguments.chunks.split(",")]
    longest = max(*contexts, *map(sum, chunks), arguments.prompt, arguments.loop_context + arguments.loop_tokens)
    num_dense, num_sparse = map(int, arguments.layers.split("+"))
    shard = Shard(0, arguments.shard)
    dtype = torch.float32 if dtype_name == "fp32" else torch.bfloat16
    torch.manual_seed(0)
    whole = Slice(
        arguments.config,
        Layers(max(num_dense, DENSE_LAYERS if shard.world == 1 else DENSE_LAYERS_OF_SHARD), num_sparse),
        device,
        dtype,
        shard,
        quantized=dtype_name == "mxfp8",
        max_positions=longest,
    )
    pools = random_pools(cache_spec(whole.config, dtype, shard), arguments.pool_bytes, device)
    limits = LayerLimits(whole.config.text, shard, whole.parameters, dtype.itemsize)
    name = {"bf16": "bfloat16", "fp32": "float32"}.get(dtype_name, dtype_name)
    bench = Bench(whole, Layers(num_dense, num_sparse), name, pools, limits, use_graphs=not arguments.eager)
    if "prefill" in parts:
        yield from prefill_rows(bench, [(start, count) for start, count in chunks])
    if "prompt" in parts:
        yield prompt_row(bench, arguments.prompt, arguments.prompt_chunk)
    batches = _numbers(arguments.batches)
    if "head" in parts:
        yield from head_rows(bench, batches)
    if "decode" in parts:
        yield from decode_rows(bench, batches, contexts, arguments.max_tokens)
    if "loop" in parts:
        before = [row for row in done if row.dtype == name]
        yield from loop_rows(bench, _numbers(arguments.loop_batches), arguments.loop_context, arguments.loop_tokens, before)


def main() -> None:
    """Measure, print and write."""
    arguments = parse()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    suffix = f"-shard{arguments.shard}" if arguments.shard > 1 else ""
    path = arguments.out or RESULTS / f"step-{device.lower().replace(' ', '-')}{suffix}.json"
    file = StepFile(path, device, " ".join(["python -m benchmarks.step", *sys.argv[1:]]))
    print(HEADER)
    for dtype_name in arguments.dtypes.split(","):
        for row in rows_of(arguments, dtype_name, set(arguments.only.split(",")), file.rows):
            file.add(row)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if arguments.shard > 1:
        for row in projections(list(file.rows), arguments.all_reduce):
            file.add(row)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
