import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.kvcache.block_manager import BlockManager, InvariantError
from server.kvcache.lanes import ALL_LANES, Lane


def key(name: int) -> bytes:
    return name.to_bytes(32, "little")


def cached(blocks: BlockManager, *names: int) -> list[int]:
    """Pages that were filled, registered and given up, in one sequence."""
    pages = blocks.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        blocks.register(page, key(name))
    blocks.release(pages)
    return pages


def test_pages_of_two_holders_are_different() -> None:
    blocks = BlockManager(6)
    first, second = blocks.allocate(2), blocks.allocate(4)
    assert sorted(first + second) == list(range(6))
    blocks.check([first, second])


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    blocks = BlockManager(4)
    held = blocks.allocate(1)
    assert blocks.can_allocate(3)
    assert not blocks.can_allocate(4)
    with pytest.raises(InvariantError, match="4 pages wanted"):
        blocks.allocate(4)
    assert blocks.num_free_pages == 3
    blocks.check([held])


def test_released_pages_without_hash_are_free() -> None:
    blocks = BlockManager(4)
    blocks.release(blocks.allocate(3))
    assert (blocks.num_free_pages, blocks.num_cached_pages) == (4, 0)


def test_a_registered_page_is_found_while_held_and_after() -> None:
    blocks = BlockManager(4)
    pages = blocks.allocate(2)
    blocks.register(pages[0], key(1))
    assert blocks.lookup([key(1), key(2)]) == pages[:1]
    blocks.release(pages)
    assert blocks.lookup([key(1), key(2)]) == pages[:1]
    assert (blocks.num_free_pages, blocks.num_cached_pages) == (3, 1)


def test_lookup_ends_at_the_first_gap() -> None:
    blocks = BlockManager(4)
    pages = cached(blocks, 1, 2, 3)
    blocks.forget([pages[1]])
    assert blocks.lookup([key(1), key(2), key(3)]) == pages[:1]


def test_a_shared_page_stays_until_its_last_holder_leaves() -> None:
    blocks = BlockManager(2)
    pages = cached(blocks, 1)
    blocks.acquire(pages)
    blocks.acquire(pages)
    blocks.release(pages)
    assert not blocks.can_allocate(2)
    blocks.check([pages])
    blocks.release(pages)
    assert blocks.can_allocate(2)


def test_can_allocate_does_not_count_the_prefix_that_is_revived() -> None:
    blocks = BlockManager(4)
    pages = cached(blocks, 1, 2)
    assert blocks.can_allocate(4)
    assert not blocks.can_allocate(3, pages)
    blocks.acquire(pages[:1])
    assert blocks.can_allocate(2, pages)
    assert not blocks.can_allocate(3, pages)


def test_free_pages_are_taken_before_cached_ones() -> None:
    blocks = BlockManager(4)
    pages = cached(blocks, 1, 2)
    assert set(blocks.allocate(2)).isdisjoint(pages)
    assert blocks.lookup([key(1), key(2)]) == pages


def test_least_recently_used_prefix_is_evicted_first_and_from_its_end() -> None:
    blocks = BlockManager(4)
    old, young = cached(blocks, 1, 2), cached(blocks, 3, 4)
    blocks.acquire(old)
    blocks.release(old)
    assert blocks.allocate(1) == [young[1]]
    assert blocks.lookup([key(3), key(4)]) == young[:1]
    assert blocks.allocate(1) == [young[0]]
    assert blocks.allocate(1) == [old[1]]
    assert blocks.lookup([key(1), key(2)]) == old[:1]


def test_the_first_page_of_a_hash_wins() -> None:
    blocks = BlockManager(4)
    first, second = blocks.allocate(1), blocks.allocate(1)
    blocks.register(first[0], key(1))
    blocks.register(second[0], key(1))
    assert blocks.lookup([key(1)]) == first
    blocks.release(second)
    assert blocks.num_cached_pages == 0
    blocks.check([first])


@pytest.mark.parametrize("lane", list(Lane))
def test_a_page_without_one_of_its_lanes_is_no_hit(lane: Lane) -> None:
    blocks = BlockManager(4)
    pages = cached(blocks, 1, 2, 3)
    blocks.set_resident(pages[1], ALL_LANES & ~lane)
    assert blocks.lookup([key(1), key(2), key(3)]) == pages[:1]
    blocks.set_resident(pages[1], ALL_LANES)
    assert blocks.lookup([key(1), key(2), key(3)]) == pages


def test_a_recomputed_page_replaces_one_that_lost_a_lane() -> None:
    blocks = BlockManager(4)
    pages = cached(blocks, 1)
    blocks.set_resident(pages[0], Lane.DENSE | Lane.INDEX)
    again = blocks.allocate(1)
    blocks.register(again[0], key(1))
    assert blocks.lookup([key(1)]) == again
    assert blocks.num_cached_pages == 0
    blocks.check([again])


def test_a_page_taken_again_has_all_lanes() -> None:
    blocks = BlockManager(1)
    pages = cached(blocks, 1)
    blocks.set_resident(pages[0], Lane.INDEX)
    again = blocks.allocate(1)
    blocks.register(again[0], key(2))
    assert blocks.lookup([key(2)]) == again


def test_forgotten_pages_are_not_found_and_their_holders_keep_them() -> None:
    blocks = BlockManager(4)
    pages = cached(blocks, 1, 2)
    blocks.acquire(pages[:1])
    blocks.forget(pages)
    assert blocks.lookup([key(1)]) == []
    assert (blocks.num_free_pages, blocks.num_cached_pages) == (3, 0)
    blocks.check([pages[:1]])
    blocks.release(pages[:1])
    assert blocks.num_free_pages == 4


def test_releasing_too_often_is_an_error() -> None:
    blocks = BlockManager(2)
    pages = blocks.allocate(1)
    blocks.release(pages)
    with pytest.raises(InvariantError, match="more often"):
        blocks.release(pages)


def test_check_names_a_holder_that_is_not_counted_and_a_count_without_holder() -> None:
    blocks = BlockManager(4)
    pages = blocks.allocate(2)
    with pytest.raises(InvariantError, match="do not match"):
        blocks.check([])
    with pytest.raises(InvariantError, match="do not match"):
        blocks.check([pages, pages[:1]])


def test_check_notices_a_lost_page() -> None:
    blocks = BlockManager(4)
    blocks._free.pop()
    with pytest.raises(InvariantError, match="3 free and 0 cached pages, but 4 without holder"):
        blocks.check([])


class AnyOrder(RuleBasedStateMachine):
    """Every verb in any order, next to a plain model of who holds what and which contents a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(5)
        self.holders: list[list[int]] = []
        self.contents: dict[int, int] = {}  # page id -> name, for pages that were registered

    @rule(num_pages=st.integers(0, 6))
    def allocate(self, num_pages: int) -> None:
        if not self.blocks.can_allocate(num_pages):
            assert num_pages > 5 - len({page for pages in self.holders for page in pages})
            return
        pages = self.blocks.allocate(num_pages)
        assert not {page for other in self.holders for page in other} & set(pages)
        for page in pages:
            self.contents.pop(page, None)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.blocks.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), name=st.integers(0, 3))
    def register(self, data: st.DataObject, name: int) -> None:
        private = [page for pages in self.holders for page in pages if page not in self.contents]
        if private:
            page = data.draw(st.sampled_from(private))
            self.blocks.register(page, key(name))
            self.contents[page] = name

    @rule(names=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    def reuse(self, names: list[int]) -> None:
        pages = self.blocks.lookup([key(name) for name in names])
        assert [self.contents[page] for page in pages] == names[: len(pages)]
        self.blocks.acquire(pages)
        self.holders.append(pages)

    @rule(page=st.integers(0, 4))
    def forget(self, page: int) -> None:
        self.blocks.forget([page])

    @invariant()
    def books_match(self) -> None:
        self.blocks.check(self.holders)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(deadline=None, max_examples=100, stateful_step_count=30)
