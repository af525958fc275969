"""What ranks say to each other, between two processes."""

import multiprocessing
import os

import pytest
import torch

from server.model.shard import Shard
from server.rank_group import FRAME_BYTES, RankGroup

WORLD = 2
SIZES = [1, 10, FRAME_BYTES - 8, FRAME_BYTES - 7, 3 * FRAME_BYTES, 0]


def message(num_bytes):
    return bytes(i % 251 for i in range(num_bytes))


def run_rank(rank, store, answers):
    if rank == 1:
        os.environ["NCCL_NVLS_ENABLE"] = "1"
    torch.set_num_threads(1)
    group = RankGroup(Shard(rank, WORLD), torch.device("cpu"), store)
    received = []
    for num_bytes in SIZES:
        if rank == 0:
            group.send(message(num_bytes))
        else:
            received.append(group.receive())
    token_ids = torch.tensor([3, 5]) + 100 * rank
    group.share(token_ids)
    flags = group.any_rank([rank == 0, rank == 1, False])
    environment = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE")}
    answers.put((rank, received, token_ids.tolist(), environment, flags, group.least(1 << (40 - rank)), group.least(rank)))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    store = tmp_path_factory.mktemp("ranks") / "store"
    processes = [context.Process(target=run_rank, args=(rank, store, queue)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    answers = sorted(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    return answers


def test_messages_of_any_length_arrive(answers):
    assert answers[1][1] == [message(num_bytes) for num_bytes in SIZES]


def test_every_rank_has_the_tokens_of_rank_0(answers):
    assert [answer[2] for answer in answers] == [[3, 5], [3, 5]]


def test_nothing_listens_beyond_the_host_and_what_the_operator_says_counts(answers):
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert [answer[3] for answer in answers] == [loopback | {"NCCL_NVLS_ENABLE": value} for value in ("0", "1")]


def test_ranks_agree(answers):
    assert [answer[4:] for answer in answers] == [([True, True, False], 1 << 39, 0)] * 2
