"""A step in the making: its budget of tokens, and the chunks that were given some. It knows no sequence."""

from dataclasses import dataclass, field

from server.scheduler.plan import Chunk, NewSequence, StepPlan


@dataclass(slots=True)
class StepDraft:
    """What is planned so far.

    Attributes:
        num_tokens_left: of the budget.
        new_sequences: those that take a slot, in the order of their admission.
        decodes: single-token chunks.
        prefills: the others.
    """

    num_tokens_left: int
    new_sequences: list[NewSequence] = field(default_factory=list)
    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.prefills

    def take(self, num_wanted: int, num_wanted_behind: int) -> int:
        """Tokens for a prompt: what is left, but for what those behind it want, of which at most half is kept for them."""
        num_tokens = min(num_wanted, self.num_tokens_left - min(num_wanted_behind, self.num_tokens_left // 2))
        self.num_tokens_left -= num_tokens
        return num_tokens

    def add(self, chunk: Chunk) -> None:
        """Plan a chunk, whose tokens were taken from the budget."""
        (self.decodes if chunk.num_tokens == 1 else self.prefills).append(chunk)

    def finish(self, step_id: int, released_slots: tuple[int, ...]) -> StepPlan:
        """The plan, with single-token chunks first."""
        return StepPlan(step_id, released_slots, tuple(self.new_sequences), (*self.decodes, *self.prefills))
