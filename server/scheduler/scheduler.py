"""What the next step computes, and what becomes of its result.

Owns the sequences, their slots and, through the block manager, their pages; no tensor. The engine's loop is `schedule()`,
`execute()`, `commit()`; it may also plan one step ahead, while the step before it still runs.

Policy:
    * Sequences are totally ordered by (priority, arrival). Running ones go first, then waiting ones are admitted in order.
    * A step has a budget of tokens. Every sequence with a single token to compute gets it; the rest goes, in order, to
      prompts in chunks. A prompt leaves half of what it finds to those behind it that want it, running or about to be
      admitted, so that a long prompt slows a short one down but never makes it wait for its end. As the budget is at least
      the number of slots, the first sequence always gets a token.
    * A sequence is admitted when the cache has room for all its known tokens, but holds only the pages of the chunks that
      were planned. When a running sequence finds no page, the last running one is preempted: its pages go back (full ones
      stay findable), and it waits again at the head of its priority, because it keeps its arrival. A sequence that is itself
      the last one pauses instead and keeps what it has. While one pauses, nobody is admitted.
    * What a step in flight writes is given back only when that step is committed, even if its sequence has ended.

Why nothing can hang: a request is refused unless prompt and output fit the empty cache. So the first running sequence can
always have its page, in the worst case after all others were preempted (or, when they are in flight, after their step is
committed: nobody behind a sequence that found no page is planned again before it). It is never a victim, hence it ends
after finitely many steps, and when nothing runs, the first waiting sequence finds every page free or cached. Only an endless
stream of requests with earlier priorities can hold up a later one, which is what priorities mean.
"""

import logging
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from server.kvcache.block_manager import BlockManager, InvariantError
from server.kvcache.prefix import PrefixHasher
from server.messages import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    RequestEvent,
    Stats,
    Submit,
    TerminalEvent,
    Tokens,
)
from server.scheduler.config import SchedulerConfig
from server.scheduler.draft import StepDraft
from server.scheduler.plan import Chunk, NewSequence, SampledToken, StepPlan, StepResult
from server.scheduler.sequence import Sequence
from server.scheduler.slots import SlotTable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Totals:
    """Counters since the start, under their names in `Stats`."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """All open sequences of an engine. Every one of them gets exactly one terminal event from one of these methods."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._blocks = BlockManager(config.num_pages)
        self._sequences: dict[str, Sequence] = {}  # open ones: no terminal event yet
        self._waiting: list[Sequence] = []  # in order
        self._running: list[Sequence] = []  # in order
        self._slots = SlotTable(config.max_num_seqs)  # running sequences, and ended ones that are in flight
        self._in_flight: deque[StepPlan] = deque()
        self._blocked: tuple[int, int] | None = None  # arrival of who found no room, and the count of releases then
        self._num_arrivals = 0
        self._num_steps_planned = 0
        self._is_checked = True  # nothing happened since the last idle check
        self._totals = _Totals()

    @property
    def has_work(self) -> bool:
        """Whether a sequence is open."""
        return bool(self._sequences)

    def add(self, submit: Submit) -> list[RequestEvent]:
        """Take a request; `Failed` at once when it can never be served, otherwise nothing yet."""
        if submit.request_id in self._sequences:
            logger.error("request %s is open already; the second one is ignored", submit.request_id)
            return []
        refusal = self._refusal(submit)
        if refusal is not None:
            return [refusal]
        hasher = None
        if self.config.enable_prefix_caching:
            hasher = PrefixHasher(self.config.page_size, submit.media, submit.cache_salt)
            hasher.extend(submit.prompt_token_ids)
        seq = Sequence(
            request_id=submit.request_id,
            token_ids=list(submit.prompt_token_ids),
            num_prompt_tokens=len(submit.prompt_token_ids),
            sampling=submit.sampling,
            media=submit.media,
            priority=submit.priority,
            arrival=self._num_arrivals,
            hasher=hasher,
        )
        self._num_arrivals += 1
        self._sequences[seq.request_id] = seq
        insort(self._waiting, seq)
        self._is_checked = False
        return []

    def _refusal(self, submit: Submit) -> Failed | None:
        num_prompt_tokens, max_tokens = len(submit.prompt_token_ids), submit.sampling.max_tokens
        if not num_prompt_tokens:
            return Failed(submit.request_id, FailureKind.INVALID, "The prompt is empty.")
        limit = self.config.max_seq_len
        if num_prompt_tokens + max_tokens <= limit:
            return None
        what = "context window" if limit == self.config.max_model_len else "cache"
        return Failed(
            submit.request_id,
            FailureKind.NO_FIT,
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
            f"{num_prompt_tokens + max_tokens} tokens; the {what} holds at most {limit}.",
        )

    def abort(self, request_id: str) -> list[RequestEvent]:
        """End a sequence wherever it is; nothing happens when it is unknown or has ended."""
        seq = self._sequences.get(request_id)
        return [] if seq is None else [self._finish(seq, FinishReason.ABORT)]

    def shutdown(self) -> list[RequestEvent]:
        """End all open sequences."""
        return [self._finish(seq, FinishReason.ABORT) for seq in list(self._sequences.values())]

    def schedule(self) -> StepPlan | None:
        """Plan one step; None when there is nothing to do (then also checks the books, so call it when idle, too).

        With no step in flight, None means that no sequence is open. O(running + admitted sequences).
        """
        draft = StepDraft(self.config.max_num_batched_tokens)
        if self._plan_running(draft):
            self._admit(draft)
        if draft.is_empty:
            self._check_when_idle()
            return None
        plan = draft.finish(self._num_steps_planned, self._slots.drain_released())
        self._num_steps_planned += 1
        self._in_flight.append(plan)
        return plan

    def _plan_running(self, draft: StepDraft) -> bool:
        """Plan the running sequences in order; False when one has to pause, and nobody may overtake it."""
        running = list(self._running)
        wanted = [seq.num_uncomputed_tokens for seq in running]
        num_singles = wanted.count(1)
        draft.num_tokens_left -= num_singles
        num_behind = sum(wanted) - num_singles + self._num_tokens_awaiting_admission()
        for seq, num_wanted in zip(running, wanted, strict=True):
            num_tokens = num_wanted
            if num_wanted > 1:
                num_behind -= num_wanted
                num_tokens = draft.take(num_wanted, num_behind)
            if not num_tokens:
                continue
            if seq.slot is None:
                break  # gave way to one before it, as did all behind it
            if not self._make_room(seq, num_tokens):
                return False
            self._advance(seq, num_tokens, len(seq.page_ids), draft)
        return True

    def _num_tokens_awaiting_admission(self) -> int:
        """Tokens that waiting sequences would compute if they were admitted now, as far as it matters to a budget."""
        if not self._waiting or self._blocked == (self._waiting[0].arrival, self._blocks.num_releases):
            return 0
        num_tokens = 0
        for seq in self._waiting[: self._slots.num_free]:
            num_tokens += seq.num_uncomputed_tokens
            if num_tokens >= self.config.max_num_batched_tokens:
                break
        return num_tokens

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Preempt from the end of the order until the next tokens of `seq` find their pages."""
        num_pages = self._num_pages(seq.num_computed_tokens + num_tokens) - len(seq.page_ids)
        while num_pages and not self._blocks.can_allocate(num_pages):
            victim = self._running[-1]
            if victim is seq or victim.num_steps_in_flight:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.pop()
        self._release(seq)
        insort(self._waiting, seq)
        self._totals.preemptions += 1

    def _admit(self, draft: StepDraft) -> None:
        """Give waiting sequences a slot, in order, until one does not fit."""
        while self._waiting and self._slots.num_free and draft.num_tokens_left:
            seq = self._waiting[0]
            if self._blocked == (seq.arrival, self._blocks.num_releases):
                return
            # At least one token stays to be computed: without it there is nothing to sample from.
            num_reusable = (seq.num_tokens - 1) // self.config.page_size
            prefix = self._blocks.lookup(seq.hasher.hashes[:num_reusable]) if seq.hasher and seq.reads_prefix_cache else []
            if not self._blocks.can_allocate(self._num_pages(seq.num_tokens) - len(prefix), prefix):
                self._blocked = (seq.arrival, self._blocks.num_releases)
                return
            self._waiting.pop(0)
            self._start(seq, prefix, draft)

    def _start(self, seq: Sequence, prefix: list[int], draft: StepDraft) -> None:
        """Move a sequence from waiting to running, with the pages of its prefix and a first chunk."""
        self._blocks.acquire(prefix)
        seq.page_ids = prefix
        seq.num_registered_pages = len(prefix)
        seq.num_computed_tokens = len(prefix) * self.config.page_size
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self._totals.prompt_tokens += seq.num_prompt_tokens
            self._totals.prefix_query_tokens += seq.num_prompt_tokens if seq.reads_prefix_cache else 0
            self._totals.prefix_hit_tokens += seq.num_cached_tokens
        slot = seq.slot = self._slots.take(seq)
        insort(self._running, seq)
        draft.new_sequences.append(
            NewSequence(slot, seq.request_id, list(seq.token_ids), seq.num_prompt_tokens, seq.sampling, seq.media)
        )
        num_tokens = draft.take(seq.num_uncomputed_tokens, self._num_tokens_awaiting_admission())
        self._advance(seq, num_tokens, 0, draft)

    def _advance(self, seq: Sequence, num_tokens: int, num_known_pages: int, draft: StepDraft) -> None:
        """Add a chunk to the plan; the runner knows the first `num_known_pages` of the page table."""
        assert seq.slot is not None
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        num_missing_pages = self._num_pages(end) - len(seq.page_ids)
        if num_missing_pages:
            seq.page_ids += self._blocks.allocate(num_missing_pages)
        samples = end == seq.num_tokens
        draft.add(Chunk(seq.slot, start, num_tokens, tuple(seq.page_ids[num_known_pages:]), samples))
        seq.num_computed_tokens = end
        seq.num_steps_in_flight += 1
        seq.num_tokens_in_flight += samples

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestEvent]:
        """Take the result of the oldest plan in flight: new tokens and the ends that they bring, in the plan's order.

        Raises:
            InvariantError: `plan` is not the oldest one in flight.
        """
        sampled = {token.slot: token for token in result.sampled}
        failures = {failure.slot: failure for failure in result.failures}
        prompt_logprobs = {entry.slot: entry for entry in result.prompt_logprobs}
        events: list[RequestEvent] = []
        for chunk, seq in self._land(plan):
            failure = failures.get(chunk.slot)
            token = sampled.get(chunk.slot)
            if failure is not None:
                self._blocks.forget(seq.page_ids)  # a corrupt page must not fail the next request with this prefix
                events.append(self._end(seq, Failed(seq.request_id, FailureKind.INTERNAL, failure.message)))
            elif chunk.samples and token is None:
                logger.error("step %d brought no token for request %s", plan.step_id, seq.request_id)
                events.append(self._end(seq, Failed(seq.request_id, FailureKind.INTERNAL, "No token was sampled.")))
            else:
                self._register(seq, chunk.start + chunk.num_tokens)
                if chunk.slot in prompt_logprobs:
                    seq.take_prompt_logprobs(prompt_logprobs[chunk.slot])
                if token is not None:
                    events += self._append(seq, token)
        return events

    def fail(self, plan: StepPlan, message: str) -> list[RequestEvent]:
        """Take the oldest plan in flight as failed: all its sequences end with `message`, the others go on.

        Raises:
            InvariantError: `plan` is not the oldest one in flight.
        """
        return [self._end(seq, Failed(seq.request_id, FailureKind.INTERNAL, message)) for _, seq in self._land(plan)]

    def _land(self, plan: StepPlan) -> list[tuple[Chunk, Sequence]]:
        """Take a plan out of flight; the chunks whose sequences are still open. What the ended ones held goes back."""
        if not self._in_flight or self._in_flight[0].step_id != plan.step_id:
            raise InvariantError(f"step {plan.step_id} is not the oldest one in flight")
        self._in_flight.popleft()
        self._totals.steps += 1
        landed = []
        for chunk in plan.chunks:
            seq = self._slots.occupant(chunk.slot)
            seq.num_steps_in_flight -= 1
            seq.num_tokens_in_flight -= chunk.samples
            if not seq.has_ended:
                landed.append((chunk, seq))
            elif not seq.num_steps_in_flight:
                self._release(seq)
        return landed

    def _register(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Make the pages findable that this step completed."""
        num_full_pages = num_computed_tokens // self.config.page_size
        if seq.hasher is None or num_full_pages <= seq.num_registered_pages:
            return
        seq.hasher.extend(seq.token_ids)
        for page in range(seq.num_registered_pages, num_full_pages):
            self._blocks.register(seq.page_ids[page], seq.hasher.hashes[page])
        seq.num_registered_pages = num_full_pages

    def _append(self, seq: Sequence, token: SampledToken) -> list[RequestEvent]:
        seq.token_ids.append(token.token_id)
        self._totals.generation_tokens += 1
        logprobs = [] if token.logprobs is None else [token.logprobs]
        events: list[RequestEvent] = [Tokens(seq.request_id, [token.token_id], logprobs, seq.prompt_logprobs)]
        seq.prompt_logprobs = []
        reason = seq.finish_reason()
        if reason is not None:
            events.append(self._finish(seq, reason))
        return events

    def _finish(self, seq: Sequence, reason: FinishReason) -> TerminalEvent:
        num_cached_tokens = seq.num_cached_tokens or 0
        return self._end(seq, Finished(seq.request_id, reason, seq.num_prompt_tokens, num_cached_tokens, seq.num_output_tokens))

    def _end(self, seq: Sequence, event: TerminalEvent) -> TerminalEvent:
        """The one way out: forget the sequence and give back what it holds, now or when its last step lands."""
        del self._sequences[seq.request_id]
        queue = self._waiting if seq.slot is None else self._running
        del queue[bisect_left(queue, seq)]
        seq.has_ended = True
        if not seq.num_steps_in_flight:
            self._release(seq)
        return event

    def _release(self, seq: Sequence) -> None:
        """Give back pages and slot."""
        self._blocks.release(seq.page_ids)
        seq.page_ids = []
        if seq.slot is not None:
            self._slots.give_back(seq.slot)
            seq.slot = None

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def check(self) -> None:
        """Compare the books of pages and slots with the sequences that hold them.

        Raises:
            InvariantError: they do not match.
        """
        occupants = self._slots.occupants()
        self._blocks.check(seq.page_ids for seq in occupants)
        self._slots.check()
        awaited = [seq for seq in occupants if seq.has_ended]
        if sorted(self._running) != sorted(seq for seq in occupants if not seq.has_ended):
            raise InvariantError("the running sequences are not those with a slot")
        if any(not seq.num_steps_in_flight for seq in awaited):
            raise InvariantError("an ended sequence holds a slot without a step in flight")

    def _check_when_idle(self) -> None:
        """Check once after the last sequence has gone; a fault is logged and costs the cached prefixes, not the service."""
        if self._sequences or self._in_flight or self._is_checked:
            return
        self._is_checked = True
        try:
            self.check()
        except InvariantError:
            logger.exception("the page cache's books are wrong; starting with empty ones")
            self._blocks = BlockManager(self.config.num_pages)

    def stats(self) -> Stats:
        """Counters and gauges."""
        totals = self._totals
        return Stats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=self._blocks.num_pages,
            num_free_pages=self._blocks.num_free_pages,
            num_cached_pages=self._blocks.num_cached_pages,
            steps_total=totals.steps,
            prompt_tokens_total=totals.prompt_tokens,
            generation_tokens_total=totals.generation_tokens,
            preemptions_total=totals.preemptions,
            prefix_query_tokens_total=totals.prefix_query_tokens,
            prefix_hit_tokens_total=totals.prefix_hit_tokens,
        )
