"""The model cut for two ranks that are processes, joined by a real process group."""

import multiprocessing

import torch

from server.kvcache.pools import CachePools
from server.model.config import M3Config, cache_spec
from server.model.m3 import M3Model
from server.model.progress import NoProgress
from server.model.shard import ProcessGroup, Shard
from tests.paged import paged_case

CPU = torch.device("cpu")
WORLD = 2
LENGTH = 40


def token_ids():
    return torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0))


def run_rank(rank, folder, store, answers):
    """One rank: load its share, run a prefill, send the logits."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    collective = ProcessGroup(torch.distributed.group.WORLD)
    config, shard = M3Config.from_file(folder), Shard(rank, WORLD)
    model = M3Model.load(folder, config, CPU, torch.float32, shard, NoProgress(), collective)
    case = paged_case([LENGTH], [LENGTH], config.text.block_size)
    pools = CachePools(cache_spec(config, torch.float32, shard), case.num_pages, CPU)
    logits = model.logits(model.forward(token_ids(), case.batch, pools))
    answers.put((rank, logits.numpy()))
    torch.distributed.destroy_process_group()


def test_two_processes_compute_what_one_computes(small_blocks, tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store = tmp_path / "store"
    ranks = [context.Process(target=run_rank, args=(rank, small_blocks.folder, store, answers)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    logits = dict(answers.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(timeout=60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    (alone,) = small_blocks.runner().step([(0, token_ids().tolist())])
    for rank in range(WORLD):
        assert (torch.from_numpy(logits[rank]) - alone).abs().max().item() < 1e-4
