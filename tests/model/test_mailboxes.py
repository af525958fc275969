import pytest
import torch

from server.kernels.all_reduce_norm import MAX_ROWS, Mailboxes
from server.kernels.norm import add_rms_norm
from server.model import shard
from server.model.mailboxes import can_map_each_other
from server.model.shard import ProcessGroup

EPS = 1e-6


def test_few_rows_go_there_and_the_others_to_the_group(monkeypatch):
    mail = Mailboxes(0, torch.zeros(2), torch.zeros(1), torch.zeros(1))
    mailed, summed = [], []
    monkeypatch.setattr(shard, "all_reduce_add_norm", lambda *args: mailed.append(args))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: summed.append(group) or x.mul_(2))
    joined = ProcessGroup("the group", mail)
    weight = torch.ones(64).bfloat16()
    few, many = (torch.ones((num_rows, 64), dtype=torch.bfloat16) for num_rows in (2, MAX_ROWS + 1))
    joined.add_rms_norm(few, few, weight, EPS)
    ((x, residual, _, _, used),) = mailed
    assert (x is few, residual is few, used is mail) == (True, True, True)
    expected = add_rms_norm(2 * many, many, weight, EPS)
    found = joined.add_rms_norm(many.clone(), many, weight, EPS)
    assert summed == ["the group"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(("world", "islands", "expected"), [(2, 1, True), (8, 1, True), (4, 2, False), (3, 3, False)])
def test_every_rank_must_reach_every_other(world, islands, expected):
    assert can_map_each_other(world, lambda i, j: i % islands == j % islands) == expected
