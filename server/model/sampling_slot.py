"""What the sampler keeps of one slot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.sampling import SamplingWork
from server.messages import SamplingParams
from server.scheduler.plan import NewSequence


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits.

    Attributes:
        slot: whose.
        position: of the token to choose = number of tokens before it.
    """

    slot: int
    position: int


@dataclass(frozen=True)
class SamplingSlot:
    """What the host knows of a slot.

    Attributes:
        work: what drawing its tokens takes.
        bias: (token id, bias) pairs, ids within the logits' width.
        num_logprobs: as submitted.
        state_row: row of its token states, None without penalties.
        follow: takes the tokens of the sequence; None when no rule depends on them.
    """

    work: SamplingWork
    bias: tuple[tuple[int, float], ...]
    num_logprobs: int | None
    state_row: int | None
    follow: Callable[[int], None] | None


def work_of(params: SamplingParams) -> SamplingWork:
    """What drawing a token with these parameters takes."""
    if params.temperature == 0:
        return SamplingWork.GREEDY
    has_filter = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return SamplingWork.FILTERED if has_filter else SamplingWork.PLAIN


def token_states(sequence: NewSequence, vocab_size: int) -> Tensor | None:
    """[V] int32 on the host, see `Adjustments`; None when nothing is penalised. Ids beyond the logits' width do not count."""
    params = sequence.sampling
    if (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0, 0, 1):
        return None

    def count(token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([i for i in token_ids if 0 <= i < vocab_size], dtype=torch.int64)
        return torch.bincount(ids, minlength=vocab_size)

    prompt, output = sequence.token_ids[: sequence.num_prompt_tokens], sequence.token_ids[sequence.num_prompt_tokens :]
    return (2 * count(output) + (count(prompt) > 0)).to(torch.int32)
