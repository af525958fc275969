"""How rank 0 leads the others through the steps: each plan goes to all of them before rank 0 launches it itself.

A rank that only follows launches the same plans in the same order until it is told to stop. Tokens and failures come from rank
0 alone; what the others must know of them is in the next message.
"""

import msgspec

from server.engine_steps import PendingStep
from server.model.runner import ModelRunner
from server.rank_group import RankGroup
from server.scheduler.plan import StepPlan, StepResult


class RankStep(msgspec.Struct, frozen=True):
    """One step for the other ranks.

    Attributes:
        plan: what to launch.
        failed_slots: of sequences that failed since the last message; whoever keeps features of their media lets them go.
    """

    plan: StepPlan
    failed_slots: tuple[int, ...] = ()


STOP = b""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankStep)


class _LeadStep:
    """A launched step that remembers which slots failed."""

    def __init__(self, step: PendingStep, failed_slots: list[int]) -> None:
        self._step = step
        self._failed_slots = failed_slots

    def wait(self) -> StepResult:
        result = self._step.wait()
        self._failed_slots += [failure.slot for failure in result.failures]
        return result


class LeadRunner:
    """The runner of rank 0 and, through the group, those of all others."""

    def __init__(self, runner: ModelRunner, group: RankGroup) -> None:
        self._runner = runner
        self._group = group
        self._failed_slots: list[int] = []

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step on all ranks.

        Raises whatever the runner and the group raise; then the ranks no longer agree, and the engine must end.
        """
        self._group.send(_encoder.encode(RankStep(plan, tuple(self._failed_slots))))
        self._failed_slots.clear()
        return _LeadStep(self._runner.launch(plan), self._failed_slots)


def follow(runner: ModelRunner, group: RankGroup) -> None:
    """Launch what rank 0 sends until it sends `STOP`; raises whatever the runner and the group raise."""
    while message := group.receive():
        step = _decoder.decode(message)
        for slot in step.failed_slots:
            runner.forget_media(slot)
        runner.launch(step.plan)
