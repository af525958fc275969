import pytest
import torch

from server.model.shard import ProcessGroup
from server.model.symmetric_sum import MAX_BYTES, SymmetricSum, can_map_each_other


class Doubled(SymmetricSum):
    """What two equal ranks would give, without a GPU."""

    def __init__(self):
        pass

    def __call__(self, x):
        return 2 * x


@pytest.mark.parametrize(
    ("x", "is_taken"),
    [
        (torch.ones((1, 6144), dtype=torch.bfloat16), True),
        (torch.ones((3, 64)), True),
        (torch.ones((1, MAX_BYTES // 2), dtype=torch.bfloat16), True),
        (torch.ones((1, MAX_BYTES // 2 + 8), dtype=torch.bfloat16), False),
        (torch.ones((1, 7), dtype=torch.bfloat16), False),
        (torch.ones((0, 64)), False),
        (torch.ones((4, 64)).T, False),
        (torch.ones((2, 64), dtype=torch.float16), False),
    ],
    ids=["a token", "float32", "as much as there is room", "too much", "no whole words", "nothing", "strided", "another dtype"],
)
def test_it_takes_what_its_kernel_can_add(x, is_taken):
    assert Doubled().takes(x) == is_taken


def test_small_sums_go_there_and_the_others_to_the_group(monkeypatch):
    sums = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: sums.append((x, group)))
    joined = ProcessGroup("the group", Doubled())
    small, large = torch.ones((2, 64)), torch.ones((MAX_BYTES // 64, 64))
    assert torch.equal(joined.all_reduce(small), 2 * small)
    assert joined.all_reduce(large) is large
    assert [(x is large, group) for x, group in sums] == [(True, "the group")]


@pytest.mark.parametrize(
    ("world", "islands", "expected"), [(2, 1, True), (8, 1, True), (4, 2, False), (3, 1, False), (1, 1, False)]
)
def test_every_rank_must_reach_every_other(world, islands, expected):
    assert can_map_each_other(world, lambda i, j: i % islands == j % islands) == expected
