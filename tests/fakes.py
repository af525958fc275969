"""A model runner without a model, for tests of the scheduler and the engine.

It keeps what the real one keeps (tokens, page table and sampling state of every slot) and a cache whose entries depend on all
tokens before them, as keys and values do. A sampled token is a digest of the sequence's entries, read through its page
table: a wrong, missing or shared page changes the tokens that come out. `expected_tokens` gives the right ones.
"""

import zlib
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from server.messages import MediaItem, SamplingParams, Submit
from server.scheduler.plan import Chunk, NewSequence, SampledToken, SlotFailure, StepPlan, StepResult

EMPTY = 0xDEAD_BEEF


def cache_entry(previous: int, token_id: int, feature: int) -> int:
    """What a position leaves in the cache, given the entry before it."""
    return (previous * 6364136223846793005 + token_id * 1442695040888963407 + feature + 1) % (1 << 64)


def media_features(media: tuple[MediaItem, ...]) -> dict[int, int]:
    """The feature shown at every placeholder position."""
    features: dict[int, int] = {}
    for item in media:
        seed = zlib.crc32(item.content_hash)
        for span in item.ranges:
            for position in range(span.offset, span.offset + span.length):
                seed = (seed * 31 + 1) % (1 << 32)
                features[position] = seed
    return features


def sample(entries: list[int], sampling: SamplingParams, num_output_tokens: int, vocab_size: int) -> int:
    """The token after a sequence with these entries; stop tokens are masked among the first `min_tokens`."""
    token_id = zlib.crc32(array("Q", entries).tobytes()) % vocab_size
    while num_output_tokens < sampling.min_tokens and token_id in sampling.stop_token_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def expected_tokens(submit: Submit, vocab_size: int) -> list[int]:
    """The whole output of a request that runs to its end, computed without pages."""
    features, entries, output = media_features(submit.media), [], []
    token_ids = list(submit.prompt_token_ids)
    sampling = submit.sampling
    while len(output) < sampling.max_tokens:
        for position in range(len(entries), len(token_ids)):
            previous = entries[-1] if entries else 0
            entries.append(cache_entry(previous, token_ids[position], features.get(position, 0)))
        token_ids.append(sample(entries, sampling, len(output), vocab_size))
        output.append(token_ids[-1])
        if output[-1] in sampling.stop_token_ids and len(output) > sampling.min_tokens:
            break
    return output


@dataclass
class _Slot:
    new: NewSequence
    token_ids: list[int]
    features: dict[int, int]
    page_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class FakeStep:
    """A step whose end is known; `log` takes note when somebody waits for it."""

    step_id: int
    outcome: StepResult | Exception
    log: list[tuple[str, int]]

    def wait(self) -> StepResult:
        self.log.append(("wait", self.step_id))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeRunner:
    """Executes plans; asserts what a plan promises.

    Attributes:
        num_tokens_computed: over all steps.
        failing: called with a chunk and its request's id; True makes the result carry a `SlotFailure` for it.
        crashing: makes the next launch raise `RuntimeError` after the plan's bookkeeping, with nothing computed.
        errors: by step id, what waiting for it raises; nothing is computed then either.
        log: launches and waits, with the ids of their steps.
    """

    def __init__(self, num_slots: int, num_pages: int, page_size: int, vocab_size: int = 64) -> None:
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.pages = [[EMPTY] * page_size for _ in range(num_pages)]
        self.slots: dict[int, _Slot] = {}
        self.num_slots = num_slots
        self.num_tokens_computed = 0
        self.failing: Callable[[Chunk, str], bool] = lambda chunk, request_id: False
        self.crashing = False
        self.errors: dict[int, Exception] = {}
        self.log: list[tuple[str, int]] = []

    def launch(self, plan: StepPlan) -> FakeStep:
        """Run one step: all writes, then all reads."""
        self.log.append(("launch", plan.step_id))
        self._update_slots(plan)
        error = self.errors.get(plan.step_id)
        if self.crashing or error is not None:
            for chunk in plan.chunks:
                self.slots[chunk.slot].token_ids += [0] * chunk.samples  # a next step may be planned on top already
        if self.crashing:
            self.crashing = False
            raise RuntimeError("the step failed")
        return FakeStep(plan.step_id, error or self._run(plan), self.log)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end."""
        return self.launch(plan).wait()

    def _run(self, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            self._compute(chunk)
        sampled, failures = [], []
        for chunk in plan.chunks:
            slot = self.slots[chunk.slot]
            token_ids = [self._sample(slot)] if chunk.samples else []
            if self.failing(chunk, slot.new.request_id):
                failures.append(SlotFailure(chunk.slot, "non-finite logits"))
            else:
                sampled += [SampledToken(chunk.slot, token_id) for token_id in token_ids]
        return StepResult(tuple(sampled), tuple(failures))

    def _update_slots(self, plan: StepPlan) -> None:
        for index in plan.released_slots:
            del self.slots[index]
        for new in plan.new_sequences:
            assert new.slot not in self.slots
            assert 0 <= new.slot < self.num_slots
            self.slots[new.slot] = _Slot(new, list(new.token_ids), media_features(new.media))
        is_single = [chunk.num_tokens == 1 for chunk in plan.chunks]
        assert is_single == sorted(is_single, reverse=True)
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            slot = self.slots[chunk.slot]
            slot.page_ids += chunk.new_page_ids
            end = chunk.start + chunk.num_tokens
            assert chunk.num_tokens >= 1
            assert chunk.samples == (end == len(slot.token_ids))
            assert len(slot.page_ids) == -(-end // self.page_size)

    def _entry(self, slot: _Slot, position: int) -> int:
        return self.pages[slot.page_ids[position // self.page_size]][position % self.page_size]

    def _compute(self, chunk: Chunk) -> None:
        slot = self.slots[chunk.slot]
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            previous = self._entry(slot, position - 1) if position else 0
            page = self.pages[slot.page_ids[position // self.page_size]]
            page[position % self.page_size] = cache_entry(previous, slot.token_ids[position], slot.features.get(position, 0))
        self.num_tokens_computed += chunk.num_tokens

    def _sample(self, slot: _Slot) -> int:
        entries = [self._entry(slot, position) for position in range(len(slot.token_ids))]
        num_output_tokens = len(slot.token_ids) - slot.new.num_prompt_tokens
        token_id = sample(entries, slot.new.sampling, num_output_tokens, self.vocab_size)
        slot.token_ids.append(token_id)
        return token_id

    def poison(self, page_ids: Collection[int]) -> None:
        """Destroy the contents of pages."""
        for page in page_ids:
            self.pages[page] = [EMPTY] * self.page_size
