"""Sums through mapped memory on two GPUs or more: right at every replay of graphs that use the mailboxes again and again."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from server.kernels.all_reduce_norm import MAX_ROWS, all_reduce_add_norm
from server.model.mailboxes import map_mailboxes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

REPLAYS, LENGTH, DIM = 50, 10, 6144


def chain(mail, x, weight, *, owned):
    """Ten sums, each of what the one before gave: integers, which bf16 adds without rounding."""
    totals, residual = [], torch.zeros_like(x)
    for _ in range(LENGTH):
        _, total = all_reduce_add_norm(x, residual, weight, 1e-6, mail, owned=owned)
        totals.append(total)
        x, residual = total % 7 + mail.rank, total % 5
    return totals


def expected_chain(base, world):
    """The same, where rank r has `base + r`."""
    residual = torch.zeros_like(base)
    for _ in range(LENGTH):
        total = world * base + world * (world - 1) // 2 + residual
        yield total
        base, residual = total % 7, total % 5


def run_rank(rank, world, store):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device)
    mail = map_mailboxes(dist.group.WORLD, device)
    dist.barrier()
    weight = torch.zeros(DIM, dtype=torch.bfloat16, device=device)
    for num_rows, owned in ((1, False), (MAX_ROWS, False), (3, True), (64, True), (7, False)):
        ramp = torch.arange(num_rows * DIM, device=device).view(num_rows, DIM) % 5
        x = torch.zeros((num_rows, DIM), dtype=torch.bfloat16, device=device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            chain(mail, x, weight, owned=owned)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            totals = chain(mail, x, weight, owned=owned)
        for replay in range(REPLAYS):
            x.copy_(ramp + rank + replay % 3)
            graph.replay()
            for i, (total, expected) in enumerate(zip(totals, expected_chain(ramp + replay % 3, world), strict=True)):
                assert torch.equal(total, expected.to(total.dtype)), (rank, num_rows, owned, replay, i)
    dist.barrier()
    dist.destroy_process_group()


def test_graphs_of_sums_are_right_at_every_replay(tmp_path):
    world = torch.cuda.device_count()
    spawn(run_rank, (world, tmp_path / "store"), nprocs=world)
