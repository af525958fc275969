"""Drives a scheduler over a fake runner, like the engine's loop, and checks what holds after every step."""

from collections import deque
from collections.abc import Callable, Iterable

from server.messages import (
    Failed,
    Finished,
    FinishReason,
    MediaItem,
    MediaKind,
    RequestEvent,
    SamplingParams,
    SlabRef,
    Submit,
    TerminalEvent,
    TokenRange,
    Tokens,
)
from server.scheduler.config import SchedulerConfig
from server.scheduler.plan import StepPlan, StepResult
from server.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, expected_tokens

VOCAB_SIZE = 64


def request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 4,
    *,
    priority: int = 0,
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
    media: tuple[MediaItem, ...] = (),
    salt: bytes = b"",
) -> Submit:
    sampling = SamplingParams(max_tokens, stop_token_ids=stop, min_tokens=min_tokens)
    return Submit(request_id, list(prompt), sampling, media, priority, salt)


def picture(content_hash: bytes, *ranges: tuple[int, int]) -> MediaItem:
    spans = tuple(TokenRange(offset, length) for offset, length in ranges)
    num_bytes = 4 * 588 * sum(span.length for span in spans)
    return MediaItem(MediaKind.IMAGE, content_hash, (1, 2, 2), spans, SlabRef(0, num_bytes, 1))


def small_config(
    num_pages: int = 16, *, num_seqs: int = 4, budget: int = 8, page_size: int = 4, window: int = 256, caching: bool = True
) -> SchedulerConfig:
    return SchedulerConfig(num_seqs, budget, window, page_size, num_pages, caching)


class Driver:
    """An engine's loop in small.

    Attributes:
        depth: steps in flight; 1 is the plain loop, 2 plans a step while the one before it runs.
        output, ends: tokens and the terminal event of every request.
    """

    def __init__(self, config: SchedulerConfig, depth: int = 1) -> None:
        self.scheduler = Scheduler(config)
        self.runner = FakeRunner(config.max_num_seqs, config.num_pages, config.page_size, VOCAB_SIZE)
        self.depth = depth
        self.submitted: dict[str, Submit] = {}
        self.output: dict[str, list[int]] = {}
        self.ends: dict[str, TerminalEvent] = {}
        self.plans: list[StepPlan] = []
        self._in_flight: deque[tuple[StepPlan, StepResult | RuntimeError]] = deque()

    def add(self, *submits: Submit) -> None:
        for submit in submits:
            self.submitted[submit.request_id] = submit
            self.output[submit.request_id] = []
            self.record(self.scheduler.add(submit))

    def abort(self, request_id: str) -> None:
        self.record(self.scheduler.abort(request_id))

    def record(self, events: list[RequestEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends
            if isinstance(event, Tokens):
                self.output[event.request_id] += event.token_ids
            else:
                self.ends[event.request_id] = event

    def step(
        self, *, before_execute: Callable[[], None] | None = None, before_commit: Callable[[], None] | None = None
    ) -> None:
        """One turn of the loop; the callbacks run where aborts may arrive."""
        plan = self.scheduler.schedule()
        if plan is None:
            assert self._in_flight or not self.scheduler.has_work
        else:
            self.plans.append(plan)
            assert sum(chunk.num_tokens for chunk in plan.chunks) <= self.scheduler.config.max_num_batched_tokens
            if before_execute is not None:
                before_execute()
            try:
                self._in_flight.append((plan, self.runner.execute(plan)))
            except RuntimeError as error:
                self._in_flight.append((plan, error))
        if before_commit is not None:
            before_commit()
        while len(self._in_flight) >= (self.depth if plan is not None else 1):
            oldest, result = self._in_flight.popleft()
            if isinstance(result, RuntimeError):
                self.record(self.scheduler.fail(oldest, str(result)))
            else:
                self.record(self.scheduler.commit(oldest, result))
        self.scheduler.check()

    def drain(self, max_steps: int = 5000) -> None:
        """Run until nothing is open."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self._in_flight:
                return
            self.step()
        raise AssertionError("no end in sight")

    def check_outputs(self) -> None:
        """Everyone ended once, with the right tokens, and everything came back."""
        assert self.ends.keys() == self.submitted.keys()
        for request_id, end in self.ends.items():
            expected = expected_tokens(self.submitted[request_id], VOCAB_SIZE)
            output = self.output[request_id]
            assert output == expected[: len(output)]
            if isinstance(end, Finished):
                assert end.num_output_tokens == len(output)
                assert end.num_prompt_tokens == len(self.submitted[request_id].prompt_token_ids)
                assert len(output) == len(expected) or end.reason is FinishReason.ABORT
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        assert stats.generation_tokens_total == sum(len(output) for output in self.output.values())
        self.scheduler.check()

    def check_slots(self) -> None:
        """The runner has been told about every released slot: only that of a last request is left."""
        self.add(request("last", [1], 1))
        self.drain()
        assert len(self.runner.slots) == 1

    def end(self, request_id: str) -> TerminalEvent:
        return self.ends[request_id]

    def num_cached_tokens(self, request_id: str) -> int:
        end = self.ends[request_id]
        assert not isinstance(end, Failed)
        return end.num_cached_tokens
