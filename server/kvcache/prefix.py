"""Names of full pages: a chain of SHA-256 digests over everything that the keys and values of a page depend on.

Owns the definition of "the same prefix". The digest of page i covers the digest of page i - 1 (the cache salt, for the first
page), the page's token ids and, for every run of media placeholders that reaches into the page, what is shown there: the
item's content hash, where the run sits in the prompt, and which of the item's features come first. Placeholders of all
pictures share one token id, so without the content hash two pictures would be one. Knows nothing of pages' ids.
"""

import hashlib
import struct
from array import array
from dataclasses import dataclass

from server.messages import MediaItem

_RUN = struct.Struct("<qqq")  # offset, length, first feature


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive placeholders at tokens `start : end`, and the bytes that stand for what they show."""

    start: int
    end: int
    record: bytes


def _runs(media: tuple[MediaItem, ...]) -> list[_Run]:
    """All placeholder runs of a prompt, in order."""
    runs = []
    for item in media:
        first_feature = 0
        for span in item.ranges:
            record = _RUN.pack(span.offset, span.length, first_feature) + item.content_hash
            runs.append(_Run(span.offset, span.offset + span.length, record))
            first_feature += span.length
    return sorted(runs, key=lambda run: run.start)


class PrefixHasher:
    """The digests of one sequence's full pages; they grow with the sequence.

    Attributes:
        hashes: 32 bytes for each full page hashed so far.
    """

    def __init__(self, page_size: int, media: tuple[MediaItem, ...] = (), cache_salt: bytes = b"") -> None:
        self.hashes: list[bytes] = []
        self._page_size = page_size
        self._runs = _runs(media)
        self._first_run = 0  # runs before it end before the next page
        self._parent = hashlib.sha256(b"prefix root" + cache_salt).digest()

    def extend(self, token_ids: list[int]) -> None:
        """Hash the full pages of `token_ids`, all known tokens of the sequence, that were not full before.

        Linear in the new pages only; a page costs about two microseconds.
        """
        size = self._page_size
        first_page, num_pages = len(self.hashes), len(token_ids) // size
        if num_pages <= first_page:
            return
        tokens = memoryview(array("I", token_ids[first_page * size : num_pages * size])).cast("B")
        num_bytes = len(tokens) // (num_pages - first_page)
        for page in range(first_page, num_pages):
            offset = (page - first_page) * num_bytes
            digest = hashlib.sha256(self._parent)
            digest.update(tokens[offset : offset + num_bytes])
            for run in self._runs_in(page * size, (page + 1) * size):
                digest.update(run.record)
            self._parent = digest.digest()
            self.hashes.append(self._parent)

    def _runs_in(self, start: int, end: int) -> list[_Run]:
        """The runs that overlap tokens `start : end`; pages are asked for in order."""
        runs = self._runs
        while self._first_run < len(runs) and runs[self._first_run].end <= start:
            self._first_run += 1
        last = self._first_run
        while last < len(runs) and runs[last].start < end:
            last += 1
        return runs[self._first_run : last]
