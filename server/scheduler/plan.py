"""What one step of the model shall do, and what came of it.

`StepPlan` goes from the scheduler to the model runner of every rank: a sequence is described in full once, when it gets its
slot, and by differences afterwards. All ranks receive the same plan. The runner keeps the token ids, the page table and the
sampling state of every slot, so that a decode step needs no token id from the host.
"""

import msgspec

from server.messages import MediaItem, SamplingParams, TokenLogprobs


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that takes a slot: newly admitted, or resumed after a preemption.

    Attributes:
        slot: row of the runner's persistent state, below `max_num_seqs`.
        request_id: for logs only.
        token_ids: all known tokens: the prompt, and on resumption what had been generated.
        num_prompt_tokens: how many of them are the prompt.
        sampling: parameters; a resumed sequence continues its own random stream at `len(token_ids)`.
        media: items in prompt order.
    """

    slot: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    media: tuple[MediaItem, ...]


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence to compute in this step.

    Attributes:
        slot: whose.
        start: position of the first token; everything before it is in the cache.
        num_tokens: how many, >= 1.
        new_page_ids: pages to append to the sequence's page table before the step; on the first chunk after taking a slot
            they include the pages of a prefix hit.
        samples: the chunk ends at the sequence's last known token, so one token is sampled after it.
    """

    slot: int
    start: int
    num_tokens: int
    new_page_ids: tuple[int, ...]
    samples: bool


class StepPlan(msgspec.Struct, frozen=True):
    """One step.

    Attributes:
        step_id: counts from 0.
        released_slots: slots whose sequences ended or were preempted since the last plan; handled before `new_sequences`.
        new_sequences: slots taken in this step.
        chunks: the work; single-token chunks come first (decodes), then the others (prefill), each slot at most once.
    """

    step_id: int
    released_slots: tuple[int, ...]
    new_sequences: tuple[NewSequence, ...]
    chunks: tuple[Chunk, ...]


class SampledToken(msgspec.Struct, frozen=True):
    """A token sampled for one slot; `logprobs` when its sequence asked for them."""

    slot: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class SlotFailure(msgspec.Struct, frozen=True):
    """One sequence's fault inside a step (for example non-finite logits); the other slots are valid.

    Attributes:
        slot: whose.
        message: client-safe text.
    """

    slot: int
    message: str


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens, from a chunk of a sequence that asked for them.

    Attributes:
        slot: whose.
        start: position of the first of these tokens, >= 1.
        logprobs: one entry per token, in order.
    """

    slot: int
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced: one `SampledToken` or `SlotFailure` per sampling chunk, and failures of other chunks.

    Attributes:
        sampled: tokens, in the order of the plan's chunks.
        failures: sequences that must end with `Failed`.
        prompt_logprobs: of the chunks of prompts that asked for them.
    """

    sampled: tuple[SampledToken, ...]
    failures: tuple[SlotFailure, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
