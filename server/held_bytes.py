"""Bytes of clients that all requests together may hold at a time."""

from server.errors import OverloadedError


class HeldBytes:
    """A count with a bound.

    Attributes:
        num_bytes: held at the moment.
    """

    def __init__(self, max_bytes: int, complaint: str) -> None:
        """`complaint` is what a client is told whose bytes would be too many."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._complaint = complaint

    def take(self, num_bytes: int) -> None:
        """Count bytes in; `give_back` counts them out.

        Raises:
            OverloadedError: there are too many already.
        """
        if self.num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(self._complaint)
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Those bytes are not held any more."""
        self.num_bytes -= num_bytes
