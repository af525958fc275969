import pytest
import torch

from server.kvcache.lanes import Lane
from server.kvcache.pools import CachePools, CacheSpec

SPEC = CacheSpec(
    layer_is_sparse=(False, True, False, True, True), num_kv_heads=2, head_dim=8, index_dim=4, page_size=16, dtype=torch.float32
)


@pytest.fixture
def pools():
    pools = CachePools(SPEC, num_pages=3, device=torch.device("cpu"))
    for lane in (pools.dense, pools.index, pools.sparse):
        lane.zero_()
    return pools


def test_bytes_per_page_is_what_the_lanes_take(pools):
    lanes = {Lane.DENSE: pools.dense, Lane.INDEX: pools.index, Lane.SPARSE: pools.sparse}
    assert {lane: tensor.nbytes for lane, tensor in lanes.items()} == {lane: 3 * size for lane, size in SPEC.lane_bytes.items()}
    assert 3 * SPEC.bytes_per_page == sum(tensor.nbytes for tensor in lanes.values())


def test_the_released_model_takes_137472_bytes_per_token():
    spec = CacheSpec(
        (False,) * 3 + (True,) * 57, num_kv_heads=4, head_dim=128, index_dim=128, page_size=128, dtype=torch.bfloat16
    )
    assert spec.lane_bytes == {Lane.DENSE: 128 * 6_144, Lane.INDEX: 128 * 14_592, Lane.SPARSE: 128 * 116_736}
    assert spec.bytes_per_page == 128 * 137_472


def test_every_layer_has_memory_of_its_own(pools):
    for layer in range(SPEC.num_layers):
        pools.kv_lane(layer).fill_(layer + 1)
        if (index := pools.index_lane(layer)) is not None:
            index.fill_(-layer - 1)
    for layer, is_sparse in enumerate(SPEC.layer_is_sparse):
        assert pools.kv_lane(layer).shape == (3, 2, 2, 16, 8)
        assert (pools.kv_lane(layer) == layer + 1).all()
        index = pools.index_lane(layer)
        assert (index is not None) == is_sparse
        if index is not None:
            assert index.shape == (3, 16, 4)
            assert (index == -layer - 1).all()


def test_poison_reaches_all_lanes_of_the_page_and_no_other_page(pools):
    pools.poison([1])
    for lane in (pools.dense, pools.index, pools.sparse):
        assert lane[:, 1].isnan().all()
        assert not lane[:, [0, 2]].isnan().any()
