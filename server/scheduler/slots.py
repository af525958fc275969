"""Which sequence sits in which row of the runner's persistent state, and which rows it has to be told about."""

from server.kvcache.block_manager import InvariantError
from server.scheduler.sequence import Sequence


class SlotTable:
    """Slots 0..num_slots-1. A sequence keeps its slot until its last step has landed; each release is reported once."""

    def __init__(self, num_slots: int) -> None:
        self._occupants: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self, seq: Sequence) -> int:
        """Put a sequence into a free slot. The plan that says so also reports the slot's earlier release."""
        slot = self._free.pop()
        self._occupants[slot] = seq
        return slot

    def give_back(self, slot: int) -> None:
        """Empty a slot."""
        self._occupants[slot] = None
        self._free.append(slot)
        self._released.append(slot)

    def drain_released(self) -> tuple[int, ...]:
        """The slots released since the last call."""
        released = tuple(self._released)
        self._released.clear()
        return released

    def occupant(self, slot: int) -> Sequence:
        """The sequence in a taken slot."""
        seq = self._occupants[slot]
        if seq is None:
            raise InvariantError(f"slot {slot} is empty")
        return seq

    def occupants(self) -> list[Sequence]:
        """All sequences with a slot."""
        return [seq for seq in self._occupants if seq is not None]

    def check(self) -> None:
        """Compare free and taken slots.

        Raises:
            InvariantError: a slot is neither, both, or believed to be another one.
        """
        if sorted(self._free) != [slot for slot, seq in enumerate(self._occupants) if seq is None]:
            raise InvariantError("the free slots are not the empty ones")
        if any(seq is not None and seq.slot != slot for slot, seq in enumerate(self._occupants)):
            raise InvariantError("a sequence does not know its slot")
