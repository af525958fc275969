"""Steps on their way: launched in the order of their plans, landed in the same order, at most so many at a time.

With one step in flight this is the plain loop: launch, wait, commit. With two, a step is planned and launched while the one
before it runs, so that the host's work hides behind the device's; the tokens are the same. A step that raises, in its launch
or later, costs the sequences in it and nothing else, unless the device is lost or steps keep failing.
"""

import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from server.heartbeat import Heartbeat
from server.messages import RequestEvent
from server.scheduler.plan import StepPlan, StepResult
from server.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
STEP_FAILED = "the model could not compute the step of this request"


class EngineFailedError(Exception):
    """The engine cannot serve any more."""


class PendingStep(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Wait for its end; raises what it raised."""


class Runner(Protocol):
    """What the loop asks of a model runner."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step behind those started before."""


@dataclass(frozen=True)
class _Launched:
    plan: StepPlan
    step: PendingStep | Exception  # what its launch raised: its turn comes after the steps before it


class StepPipeline:
    """The steps in flight of one scheduler and its runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        send: Callable[[Sequence[RequestEvent]], None],
        heartbeat: Heartbeat,
        *,
        overlap: bool,
        max_failed_steps: int = MAX_FAILED_STEPS,
    ) -> None:
        """Start with nothing in flight.

        Args:
            scheduler: whose plans are run.
            runner: runs them.
            send: takes the events of a step when it has landed.
            heartbeat: where steps are noted.
            overlap: keep one step in flight while the next one is planned.
            max_failed_steps: so many in a row are the end.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._send = send
        self._heartbeat = heartbeat
        self._num_ahead = 1 if overlap else 0
        self._in_flight: deque[_Launched] = deque()
        self._num_failed_steps = 0
        self._max_failed_steps = max_failed_steps

    def __bool__(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def advance(self, plan: StepPlan | None) -> None:
        """Launch `plan` and land the steps before it; without a plan, or when its launch fails, land all.

        Raises:
            EngineFailedError: the device is lost, or several steps in a row failed; what is in flight was answered.
        """
        is_ahead = plan is not None and self._launch(plan)
        while len(self._in_flight) > (self._num_ahead if is_ahead else 0):
            self._land()

    def _launch(self, plan: StepPlan) -> bool:
        self._heartbeat.step_started()
        step: PendingStep | Exception
        try:
            step = self._runner.launch(plan)
        except Exception as error:
            # Its frames hold what the step has computed so far, and the next step may need that memory.
            traceback.clear_frames(error.__traceback__)
            step = error
        self._in_flight.append(_Launched(plan, step))
        return not isinstance(step, Exception)

    def _land(self) -> None:
        """Wait for the oldest step and commit it, or end its sequences."""
        launched = self._in_flight.popleft()
        plan, step = launched.plan, launched.step
        try:
            if isinstance(step, Exception):
                raise step
            result = step.wait()
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            self._fail(plan)
            self._num_failed_steps += 1
            if isinstance(error, torch.AcceleratorError) or self._num_failed_steps >= self._max_failed_steps:
                while self._in_flight:
                    self._fail(self._in_flight.popleft().plan)
                raise EngineFailedError(f"{self._num_failed_steps} steps in a row failed, the last with: {error}") from error
            return
        self._note_end(plan)
        self._num_failed_steps = 0
        self._send(self._scheduler.commit(plan, result))

    def _fail(self, plan: StepPlan) -> None:
        self._note_end(plan)
        self._send(self._scheduler.fail(plan, STEP_FAILED))

    def _note_end(self, plan: StepPlan) -> None:
        self._heartbeat.step_ended(sum(chunk.num_tokens for chunk in plan.chunks))
