import threading

import pytest
import torch

from server.kernels.norm import add_rms_norm
from server.kvcache.pools import CachePools
from server.model.config import cache_spec
from server.model.loader import load_parameters
from server.model.m3 import M3Model
from server.model.progress import NoProgress
from server.model.shard import Shard
from server.model.weights import parameters
from tests.paged import paged_case

CPU = torch.device("cpu")
WORLD = 2


class ThreadSum:
    """The collective of ranks that are threads of one process."""

    def __init__(self, world):
        self._barrier = threading.Barrier(world, timeout=60)
        self._parts = {}
        self.rank = threading.local()

    def add_rms_norm(self, x, *others):
        return add_rms_norm(self._join(x, lambda parts: torch.stack(parts).sum(0)), *others)

    def all_gather(self, x):
        return self._join(x, lambda parts: torch.cat(parts, dim=1))

    def _join(self, x, join):
        self._parts[self.rank.index] = x
        self._barrier.wait()
        joined = join([self._parts[rank] for rank in sorted(self._parts)])
        if self._barrier.wait() == 0:
            self._parts.clear()
        self._barrier.wait()
        return joined


def shares(oracle, world):
    return [
        load_parameters(oracle.folder, parameters(oracle.config, Shard(rank, world)), CPU, torch.float32, NoProgress())
        for rank in range(world)
    ]


@pytest.mark.parametrize("name", ["layers.1.out", "layers.0.mlp.down", "layers.1.w2"])
def test_column_shares_together_are_the_whole(small_blocks, name):
    (whole,) = shares(small_blocks, 1)
    parts = [share[name] for share in shares(small_blocks, WORLD)]
    assert torch.equal(torch.cat(parts, dim=-1), whole[name])


@pytest.mark.parametrize("name", ["layers.0.mlp.gate_up", "layers.1.w13"])
def test_gate_and_up_shares_together_are_the_whole(small_blocks, name):
    (whole,) = shares(small_blocks, 1)
    halves = [share[name].chunk(2, dim=-2) for share in shares(small_blocks, WORLD)]
    gate, up = (torch.cat(parts, dim=-2) for parts in zip(*halves, strict=True))
    assert torch.equal(torch.cat((gate, up), dim=-2), whole[name])


def test_heads_are_cut_with_their_kv_and_index_heads_and_the_index_key_is_on_every_rank(small_blocks):
    text = small_blocks.config.text
    widths = [text.num_heads * 16, text.num_kv_heads * 16, text.num_kv_heads * 16, text.index_num_heads * 16]
    (whole,) = shares(small_blocks, 1)
    ranks = [share["layers.1.qkv"].split([width // WORLD for width in widths] + [16]) for share in shares(small_blocks, WORLD)]
    joined = [torch.cat(parts) for parts in list(zip(*ranks, strict=True))[:4]]
    assert torch.equal(torch.cat([*joined, ranks[0][4]]), whole["layers.1.qkv"])
    assert torch.equal(ranks[0][4], ranks[1][4])


def test_everything_else_is_on_every_rank(small_blocks):
    cut = ("qkv", "out", "gate_up", "down", "w13", "w2", "lm_head")
    (whole,) = shares(small_blocks, 1)
    for share in shares(small_blocks, WORLD):
        assert share.keys() == whole.keys()
        for name, tensor in share.items():
            if not name.endswith(cut) or name.startswith("vision"):
                assert torch.equal(tensor, whole[name])


def test_two_ranks_compute_what_one_computes(small_blocks):
    ids = torch.randint(0, 250, (300,), generator=torch.Generator().manual_seed(0))
    case = paged_case([300], [300], 16)
    collective, results = ThreadSum(WORLD), [None] * WORLD

    def run(rank):
        torch.set_num_threads(1)
        collective.rank.index = rank
        shard = Shard(rank, WORLD)
        model = M3Model.load(small_blocks.folder, small_blocks.config, CPU, torch.float32, shard, NoProgress(), collective)
        pools = CachePools(cache_spec(small_blocks.config, torch.float32, shard), case.num_pages, CPU)
        pools.poison(range(case.num_pages))
        results[rank] = model.logits(model.forward(ids, case.batch, pools))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (alone,) = small_blocks.runner().step([(0, ids.tolist())])
    for logits in results:
        assert (logits - alone).abs().max().item() < 1e-4


def test_more_ranks_than_kv_heads_share_them():
    assert [Shard(rank, 8).kv_heads(4).start for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [Shard(rank, 2).kv_heads(4) for rank in range(2)] == [slice(0, 2), slice(2, 4)]


@pytest.mark.parametrize("cut", [lambda: Shard(0, 3).even(64, "num_attention_heads"), lambda: Shard(0, 6).kv_heads(4)])
def test_an_uneven_cut_is_refused_by_name(cut):
    with pytest.raises(ValueError, match=r"num_\w+_heads: \d+ cannot be cut for \d ranks"):
        cut()


def test_several_ranks_need_a_collective(small_blocks):
    with pytest.raises(ValueError, match="collective"):
        M3Model.load(small_blocks.folder, small_blocks.config, CPU, torch.float32, Shard(0, 2), NoProgress())
