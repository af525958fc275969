"""A step that the device works on. Its end is waited for once, its sampled tokens possibly earlier."""

from collections.abc import Callable, Sequence

import torch

from server.model.pending_sample import PendingSample, SampleResult
from server.scheduler.plan import PromptLogprobs, SlotFailure, StepResult


class PendingStep:
    """A launched step. It belongs to the thread of its runner."""

    def __init__(
        self,
        device: torch.device,
        sample: PendingSample | None,
        failures: Sequence[SlotFailure],
        prompt_logprobs: Sequence[PromptLogprobs],
        on_failure: Callable[[int], None],
    ) -> None:
        """Take note of a step whose work is enqueued.

        Args:
            device: where.
            sample: of the rows that sample.
            failures: those that are known already.
            prompt_logprobs: of the chunks that asked for them.
            on_failure: called with the slot of every failure when the step has ended.
        """
        self._sample = sample
        self._failures = failures
        self._prompt_logprobs = prompt_logprobs
        self._on_failure = on_failure
        self._outcome: SampleResult | Exception = ((), ())
        self._end: torch.cuda.Event | None = None
        if sample is None and device.type == "cuda":
            self._end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._end.record()

    def settle(self) -> None:
        """Wait until the sampled tokens are known to the sampler; a fault of theirs is kept for `wait`."""
        if self._sample is None:
            return
        try:
            self._outcome = self._sample.wait()
        except Exception as error:
            self._outcome = error
        self._sample = None

    def wait(self) -> StepResult:
        """Wait for the step's end. Raises whatever went wrong on the device; then every sequence of the step is lost."""
        self.settle()
        if self._end is not None:
            self._end.synchronize()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        sampled, faults = self._outcome
        failures = (*self._failures, *faults)
        for failure in failures:
            self._on_failure(failure.slot)
        return StepResult(sampled, failures, tuple(self._prompt_logprobs))
