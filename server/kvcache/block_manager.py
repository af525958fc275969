"""Who holds which page of the cache, and which pages can be found again.

Owns page ids, reference counts, the index from prefix hashes to pages and the order of eviction. Must not know tensors,
tokens or sequences. Every page is in exactly one of three states:

    free      no holder, no hash: its contents mean nothing
    held      one or more holders; with a hash once it is full and computed, then immutable and shareable
    cached    no holder, but a hash: the next equal prefix revives it; evicted, least recently used first, when no page is free

    free ──allocate──▶ held ──release──▶ cached (with hash) or free (without)
    cached ──acquire──▶ held             cached ──evict inside allocate──▶ held

All verbs are O(1) per page.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from server.kvcache.lanes import ALL_LANES, Lane


class InvariantError(Exception):
    """The bookkeeping contradicts itself: a bug of this server, never of a request."""


class BlockManager:
    """Pages 0..num_pages-1 of the cache.

    Attributes:
        num_pages: all of them.
        num_releases: counts calls of `release`; while it stands still, a request for pages that failed fails again.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_releases = 0
        self._num_holders = [0] * num_pages
        self._hash_of: list[bytes | None] = [None] * num_pages
        self._lanes = [ALL_LANES] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free_pages(self) -> int:
        """Pages without holder and without contents."""
        return len(self._free)

    @property
    def num_cached_pages(self) -> int:
        """Pages without holder whose contents can be found again; an allocation may take them."""
        return len(self._cached)

    def can_allocate(self, num_pages: int, prefix: Sequence[int] = ()) -> bool:
        """Whether `allocate(num_pages)` succeeds, after `acquire(prefix)` if a prefix is given."""
        num_revived = sum(not self._num_holders[page] for page in prefix)
        return num_pages <= len(self._free) + len(self._cached) - num_revived

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages with undefined contents, one holder each.

        Raises:
            InvariantError: `can_allocate` would have said no; nothing was taken.
        """
        if not self.can_allocate(num_pages):
            raise InvariantError(f"{num_pages} pages wanted, {len(self._free)} free and {len(self._cached)} cached")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(num_pages)]
        for page in pages:
            self._num_holders[page] = 1
            self._lanes[page] = ALL_LANES
        return pages

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._drop_hash(page)
        return page

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix of `hashes`. A page that is not resident in all lanes ends it."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None or self._lanes[page] != ALL_LANES:
                break
            pages.append(page)
        return pages

    def acquire(self, page_ids: Sequence[int]) -> None:
        """Become one more holder of pages that `lookup` returned."""
        for page in page_ids:
            if not self._num_holders[page]:
                del self._cached[page]
            self._num_holders[page] += 1

    def release(self, page_ids: Sequence[int]) -> None:
        """Give up pages, in the order of the sequence: of equally recent pages, the end of a prefix is evicted first.

        Raises:
            InvariantError: a page has no holder.
        """
        self.num_releases += 1
        for page in reversed(page_ids):
            if not self._num_holders[page]:
                raise InvariantError(f"page {page} released more often than taken")
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if self._hash_of[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def register(self, page_id: int, page_hash: bytes) -> None:
        """Make a full, computed page of the caller's findable.

        The first page of a hash wins; a later equal one stays private, unless the first has lost a lane.
        """
        known = self._page_of.get(page_hash)
        if known is not None:
            if self._lanes[known] == ALL_LANES:
                return
            self.forget((known,))
        self._page_of[page_hash] = page_id
        self._hash_of[page_id] = page_hash

    def forget(self, page_ids: Iterable[int]) -> None:
        """Make pages unfindable, because their contents are in doubt; holders keep them."""
        for page in page_ids:
            if self._hash_of[page] is None:
                continue
            self._drop_hash(page)
            if not self._num_holders[page]:
                del self._cached[page]
                self._free.append(page)

    def _drop_hash(self, page: int) -> None:
        page_hash = self._hash_of[page]
        if page_hash is not None:
            del self._page_of[page_hash]
            self._hash_of[page] = None

    def set_resident(self, page_id: int, lanes: Lane) -> None:
        """Record which lanes of a page are on the device."""
        self._lanes[page_id] = lanes

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the books with the page lists of everyone who holds pages. O(num_pages).

        Raises:
            InvariantError: free + held + cached is not all pages, a count differs from the number of holders, or the index
                of hashes is not one to one.
        """
        counts = Counter(page for pages in holders for page in pages)
        wrong = [page for page in range(self.num_pages) if self._num_holders[page] != counts[page]]
        if wrong:
            raise InvariantError(f"holders of pages {wrong[:8]} do not match their counts")
        free = set(self._free)
        idle = [page for page in range(self.num_pages) if not self._num_holders[page]]
        if len(free) != len(self._free) or sorted((*free, *self._cached)) != idle:
            raise InvariantError(f"{len(self._free)} free and {len(self._cached)} cached pages, but {len(idle)} without holder")
        named = {page for page, page_hash in enumerate(self._hash_of) if page_hash is not None}
        if free & named or not self._cached.keys() <= named:
            raise InvariantError("a free page has a hash, or a cached page has none")
        if named != set(self._page_of.values()) or len(named) != len(self._page_of):
            raise InvariantError("the index of hashes does not match the pages")
