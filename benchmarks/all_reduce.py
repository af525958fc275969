"""The sum over ranks of one step's activations: `python -m benchmarks.all_reduce` on a machine with two or more GPUs.

Times the sum with the residual addition and the norm behind it, on [T, 6144] bf16 in CUDA graphs without NVLink multicast: what
the server does, both of its ways, NCCL and PyTorch's symmetric-memory kernel with the norm as a launch of its own, and that
norm alone. Writes `results/all-reduce-<ranks>x-<device>.json`.
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
from server.kernels.all_reduce_norm import Mailboxes, all_reduce_add_norm
from server.kernels.norm import add_rms_norm
from server.model.mailboxes import map_mailboxes
from server.model.shard import ProcessGroup

HIDDEN, EPS = 6144, 1e-6
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_CALLS = 50  # in a graph
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def ways(num_tokens: int, rank: int, group: dist.ProcessGroup, mail: Mailboxes) -> dict[str, Callable[[], object]]:
    """The ways to add up, add the residual and normalise, each on tensors of its own, and the last two alone."""
    import torch.distributed._symmetric_memory as symm_mem

    device = torch.device("cuda", rank)
    weight = torch.zeros(HIDDEN, dtype=torch.bfloat16, device=device)
    buffer = symm_mem.empty((num_tokens, HIDDEN), dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(buffer, group)

    def rows() -> Tensor:
        return torch.randn((num_tokens, HIDDEN), device=device).bfloat16()

    def pytorch(x: Tensor, residual: Tensor) -> object:
        total = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group.group_name)
        return add_rms_norm(total, residual, weight, EPS)

    calls: dict[str, Callable[[], object]] = {
        "norm alone": functools.partial(add_rms_norm, rows(), rows(), weight, EPS),
        "server": functools.partial(ProcessGroup(group, mail).add_rms_norm, rows(), rows(), weight, EPS),
        "one shot": functools.partial(all_reduce_add_norm, rows(), rows(), weight, EPS, mail, owned=False),
        "two shots": functools.partial(all_reduce_add_norm, rows(), rows(), weight, EPS, mail, owned=True),
        "NCCL": functools.partial(ProcessGroup(group).add_rms_norm, rows().zero_(), rows(), weight, EPS),
        "PyTorch's one shot": functools.partial(pytorch, rows(), rows()),
    }
    return calls


def measure(rank: int, num_ranks: int, port: int, path: str) -> None:
    """One rank; the first one writes what it measured."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=num_ranks, device_id=torch.device("cuda", rank))
    group = dist.group.WORLD
    assert group is not None
    mail = map_mailboxes(group, torch.device("cuda", rank))
    dist.barrier()
    rows: list[dict[str, object]] = []
    for num_tokens in TOKENS:
        for name, call in ways(num_tokens, rank, group, mail).items():
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
                    f"T {num_tokens:4d}  {name:18s} {timing.us:7.2f} us  [{timing.low_us:.2f}..{timing.high_us:.2f}]",
                    flush=True,
                )
    if rank == 0:
        result = {
            "device": torch.cuda.get_device_name(),
            "num_gpus": num_ranks,
            "method": f"CUDA graph of {NUM_CALLS} calls, no NVLink multicast",
            **measured_with("python -m benchmarks.all_reduce"),
            "rows": rows,
        }
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


class Sums:
    """What was measured.

    Attributes:
        num_gpus: between how many.
    """

    def __init__(self, path: Path) -> None:
        """Read a result file."""
        result = json.loads(path.read_text())
        self.num_gpus: int = result["num_gpus"]
        self._rows = result["rows"]

    def us(self, num_tokens: int) -> float:
        """What the server's sum of at least `num_tokens` tokens takes beyond the norm that any rank has."""
        enough = min(row["num_tokens"] for row in self._rows if row["num_tokens"] >= num_tokens)
        us = {row["what"]: float(row["us"]) for row in self._rows if row["num_tokens"] == enough}
        return us["server"] - us["norm alone"]


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
