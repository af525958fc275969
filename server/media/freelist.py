"""Which stretches of a row of equal units are free: first fit, all or nothing, neighbours joined. Pure bookkeeping."""

from collections.abc import Sequence


class FreeList:
    """The free units among `num_units`, as stretches in order of position, no two of them adjacent."""

    def __init__(self, num_units: int) -> None:
        self._free = [(0, num_units)] if num_units else []

    @property
    def num_free(self) -> int:
        """Units that are free, in however many stretches."""
        return sum(length for _, length in self._free)

    def take(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Take a stretch of each length in `counts`.

        Returns:
            the first unit of each, or None with nothing taken when they do not all fit.
        """
        free = list(self._free)
        firsts = []
        for count in counts:
            index = next((index for index, (_, length) in enumerate(free) if length >= count), None)
            if index is None:
                return None
            first, length = free[index]
            free[index : index + 1] = [(first + count, length - count)] if length > count else []
            firsts.append(first)
        self._free = free
        return tuple(firsts)

    def give(self, first: int, count: int) -> None:
        """Give back a stretch that was taken."""
        index = next((index for index, (start, _) in enumerate(self._free) if start > first), len(self._free))
        if index < len(self._free) and first + count == self._free[index][0]:
            count += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == first:
            index -= 1
            start, length = self._free.pop(index)
            first, count = start, length + count
        self._free.insert(index, (first, count))
