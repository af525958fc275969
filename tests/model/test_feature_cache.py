import pytest
import torch

from server.model.feature_cache import FeatureCache, FeatureKey


def key(number):
    return FeatureKey(bytes([number]) * 32, 0)


def features(num_rows, value=0.0):
    return torch.full((num_rows, 4), value)


class Unclonable:
    """Features for whose copy the device has no memory."""

    nbytes = 32

    def clone(self):
        raise torch.OutOfMemoryError("no")


def test_the_least_recently_used_go_first():
    cache = FeatureCache(3 * features(1).nbytes)
    for number in range(3):
        cache.put(key(number), features(1, float(number)))
    assert cache.get(key(0)) is not None
    cache.put(key(3), features(2, 3.0))
    assert [cache.get(key(number)) is not None for number in range(4)] == [True, False, False, True]
    assert cache.num_bytes == features(3).nbytes
    assert (cache.num_hits, cache.num_misses) == (3, 2)


def test_what_is_larger_than_the_cache_displaces_nothing():
    cache = FeatureCache(features(1).nbytes)
    cache.put(key(0), features(1))
    cache.put(key(1), features(2))
    assert cache.get(key(0)) is not None
    assert cache.get(key(1)) is None


def test_what_is_held_is_a_copy_of_its_own():
    cache, batch = FeatureCache(1 << 10), features(5, 7.0)
    cache.put(key(0), batch[:1])
    batch.zero_()
    held = cache.get(key(0))
    assert held.tolist() == [[7.0] * 4]
    assert held.untyped_storage().nbytes() == held.nbytes


@pytest.mark.parametrize("capacity", [32, 64])
def test_an_entry_for_which_there_is_no_memory_is_not_kept(capacity):
    cache = FeatureCache(capacity)
    cache.put(key(0), features(2, 5.0))
    cache.put(key(1), Unclonable())
    assert cache.get(key(1)) is None
    num_left = len(cache)
    assert cache.num_bytes == num_left * features(2).nbytes
    cache.put(key(2), features(2, 6.0))
    assert torch.equal(cache.get(key(2)), features(2, 6.0))


def test_dropping_makes_room():
    cache = FeatureCache(1 << 10)
    cache.put(key(0), features(1))
    cache.drop(key(0))
    cache.drop(key(1))
    assert (len(cache), cache.num_bytes) == (0, 0)
