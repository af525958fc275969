"""One sequence on its way through the scheduler: its tokens, its place and its counters. Knows no other sequence.

The counters form a small algebra. `token_ids` are the tokens whose values are known here; a step in flight may add one more,
which the runner already feeds to the next step although its value has not come back:

    num_tokens            = len(token_ids) + num_tokens_in_flight
    num_output_tokens     = len(token_ids) - num_prompt_tokens     <= max_tokens, also with the one in flight
    num_computed_tokens   <= num_tokens                            advanced when a step is planned, not when it is done
    num_uncomputed_tokens = num_tokens - num_computed_tokens       0 when only the last sample is awaited

There is no prefill and no decode: each step lets `num_computed_tokens` catch up with `num_tokens`, and reaching it samples.
"""

from dataclasses import dataclass, field

from server.kvcache.prefix import PrefixHasher
from server.messages import FinishReason, MediaItem, SamplingParams, TokenLogprobs
from server.scheduler.plan import PromptLogprobs


@dataclass(eq=False, slots=True)
class Sequence:
    """A request inside the engine.

    Attributes:
        request_id, sampling, media, priority: as submitted.
        token_ids: prompt and committed output.
        num_prompt_tokens: how many of them are the prompt.
        arrival: counts submissions; with the priority it orders sequences totally.
        hasher: names of the full pages; None when prefixes are not reused.
        slot: row of the runner's state; None while it waits.
        page_ids: pages held, in the order of positions.
        num_computed_tokens: tokens in the cache once the planned steps are done; set anew with every slot.
        num_registered_pages: leading pages that were found or made findable; set anew with every slot.
        num_cached_tokens: prompt tokens found in the cache at the first admission; None before it.
        num_steps_in_flight: planned steps that still write its pages; nothing it holds may be given back before.
        num_tokens_in_flight: tokens that these steps sample.
        prompt_logprobs: of the prompt's tokens from the second one on, as far as computed; emptied when they went out.
        has_ended: the terminal event is out.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    media: tuple[MediaItem, ...]
    priority: int
    arrival: int
    hasher: PrefixHasher | None
    slot: int | None = None
    page_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_registered_pages: int = 0
    num_cached_tokens: int | None = None
    num_steps_in_flight: int = 0
    num_tokens_in_flight: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_ended: bool = False

    def __lt__(self, other: "Sequence") -> bool:
        """Runs earlier: lower priority value first, then first come first served."""
        return (self.priority, self.arrival) < (other.priority, other.arrival)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, whether or not their values have come back."""
        return len(self.token_ids) + self.num_tokens_in_flight

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether pages that others computed may stand for its own: not while it needs the logits of its prompt."""
        return self.hasher is not None and (self.sampling.num_prompt_logprobs is None or self.num_output_tokens > 0)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and committed."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when no further one will be."""
        num_tokens = len(self.token_ids) + self.num_tokens_in_flight
        if num_tokens - self.num_prompt_tokens >= self.sampling.max_tokens:
            return 0
        return num_tokens - self.num_computed_tokens

    def take_prompt_logprobs(self, entry: PromptLogprobs) -> None:
        """Keep what is new; a prompt computed again after a preemption brings what is known or went out already."""
        num_known = len(self.prompt_logprobs)
        if not self.num_output_tokens and entry.start + len(entry.logprobs) > num_known + 1:
            self.prompt_logprobs += entry.logprobs[num_known + 1 - entry.start :]

    def finish_reason(self) -> FinishReason | None:
        """Whether the last token of `token_ids` ends the sequence, and why.

        A stop token among the first `min_tokens` does not count: the sampler masks it there.
        """
        if self.token_ids[-1] in self.sampling.stop_token_ids and self.num_output_tokens > self.sampling.min_tokens:
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
