"""The sum over ranks of one step's activations: `python -m benchmarks.all_reduce` on a machine with two or more GPUs.

Times what the server does, NCCL, and PyTorch's symmetric-memory kernels on [T, 6144] bf16 that lie where these want them, in
CUDA graphs, without NVLink multicast, and writes `results/all-reduce-<ranks>x-<device>.json`.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.report import RESULTS, measured_with
from benchmarks.timing import Timing, time_graph
from server.model.shard import ProcessGroup
from server.model.symmetric_sum import SymmetricSum

HIDDEN = 6144
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_CALLS = 50  # in a graph
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def ways(num_tokens: int, rank: int, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """The ways to sum, each on a buffer of its own."""
    import torch.distributed._symmetric_memory as symm_mem

    device = torch.device("cuda", rank)
    plain = torch.zeros((num_tokens, HIDDEN), dtype=torch.bfloat16, device=device)

    def shared() -> Tensor:
        buffer = symm_mem.empty((num_tokens, HIDDEN), dtype=torch.bfloat16, device=device)
        symm_mem.rendezvous(buffer, group)
        return buffer.zero_()

    one, two = shared(), shared()
    joined = ProcessGroup(group, SymmetricSum(group, device))
    return {
        "server": functools.partial(joined.all_reduce, torch.zeros_like(plain)),
        "nccl": functools.partial(dist.all_reduce, plain),
        "one shot": functools.partial(torch.ops.symm_mem.one_shot_all_reduce, one, "sum", group.group_name),
        "two shot": functools.partial(torch.ops.symm_mem.two_shot_all_reduce_, two, "sum", group.group_name),
    }


def measure(rank: int, num_ranks: int, port: int, path: str) -> None:
    """One rank; the first one writes what it measured."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=num_ranks, device_id=torch.device("cuda", rank))
    group = dist.group.WORLD
    assert group is not None
    rows: list[dict[str, object]] = []
    for num_tokens in TOKENS:
        for name, call in ways(num_tokens, rank, group).items():
            dist.barrier()
            timing: Timing = time_graph([call] * NUM_CALLS)
            rows.append(
                {
                    "what": name,
                    "num_tokens": num_tokens,
                    "us": round(timing.us, 2),
                    "low_us": round(timing.low_us, 2),
                    "high_us": round(timing.high_us, 2),
                }
            )
            if rank == 0:
                print(
                    f"T {num_tokens:4d}  {name:9s} {timing.us:7.2f} us  [{timing.low_us:.2f}..{timing.high_us:.2f}]", flush=True
                )
    if rank == 0:
        result = {
            "device": f"{num_ranks} x {torch.cuda.get_device_name()}",
            "method": f"CUDA graph of {NUM_CALLS} sums, no NVLink multicast",
            **measured_with("python -m benchmarks.all_reduce"),
            "rows": rows,
        }
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def server_us(path: Path, num_tokens: int) -> float:
    """What the server's sum took for at least `num_tokens` tokens."""
    rows = [row for row in json.loads(path.read_text())["rows"] if row["what"] == "server"]
    enough = min(row["num_tokens"] for row in rows if row["num_tokens"] >= num_tokens)
    return float(next(row["us"] for row in rows if row["num_tokens"] == enough))


def main() -> None:
    """Start a process per GPU."""
    parser = argparse.ArgumentParser(description="Time the sum over ranks.")
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ |= NO_MULTICAST
    num_ranks = torch.cuda.device_count()
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    path = arguments.out / f"all-reduce-{num_ranks}x-{device}.json"
    spawn(measure, (num_ranks, arguments.port, str(path)), nprocs=num_ranks)  # type: ignore[no-untyped-call]
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
