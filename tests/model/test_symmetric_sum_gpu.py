"""Sums in mapped memory on two GPUs: right at every replay of a graph that uses the one buffer again and again."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from server.model.symmetric_sum import MAX_BYTES, SymmetricSum

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

WORLD, REPLAYS, LENGTH = 2, 50, 10


def chain(small_sum, x):
    """Ten sums, each of what the one before gave: integers, which bf16 adds without rounding."""
    totals = []
    for _ in range(LENGTH):
        totals.append(small_sum(x))
        x = totals[-1] % 7 + 1
    return totals


def run_rank(rank, store):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=WORLD, device_id=device)
    small_sum = SymmetricSum(dist.group.WORLD, device)
    for shape, dtype in (((1, 6144), torch.bfloat16), ((3, 64), torch.float32), ((1, MAX_BYTES // 2), torch.bfloat16)):
        ramp = torch.arange(shape[0] * shape[1], device=device).view(shape) % 5
        x = torch.zeros(shape, dtype=dtype, device=device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            chain(small_sum, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            totals = chain(small_sum, x)
        for replay in range(REPLAYS):
            x.copy_(ramp + rank + replay % 3)
            graph.replay()
            expected = 2 * ramp + 1 + 2 * (replay % 3)
            for total in totals:
                assert torch.equal(total, expected.to(dtype)), (rank, shape, replay)
                expected = 2 * (expected % 7 + 1)
    dist.barrier()
    dist.destroy_process_group()


def test_graphs_of_sums_are_right_at_every_replay(tmp_path):
    spawn(run_rank, (tmp_path / "store",), nprocs=WORLD)
