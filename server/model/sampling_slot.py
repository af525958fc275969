"""What the sampler keeps of one slot: its parameters, and the tensors that bias and penalties need."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


class SamplingPath(enum.Enum):
    """How a row is drawn. `TOP_K` ranks only the best logits, `RANKED` all of them."""

    GREEDY = enum.auto()
    PLAIN = enum.auto()
    TOP_K = enum.auto()
    RANKED = enum.auto()


@dataclass(frozen=True)
class SamplingSlot:
    """What the host knows of a slot. The tensors are None when its parameters do not need them.

    Attributes:
        params: as submitted.
        bias_ids, bias_values: [n] int64, [n] fp32.
        prompt_seen: [V] bool.
        output_counts: [V] int32, updated with every token.
    """

    params: SamplingParams
    bias_ids: Tensor | None
    bias_values: Tensor | None
    prompt_seen: Tensor | None
    output_counts: Tensor | None

    @classmethod
    def of(cls, sequence: NewSequence, vocab_size: int, device: torch.device) -> "SamplingSlot":
        """The state of a new or resumed sequence; ids beyond the logits' width do not count."""
        params = sequence.sampling
        bias = [(token_id, value) for token_id, value in params.logit_bias if 0 <= token_id < vocab_size]
        is_penalised = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)

        def count(token_ids: Sequence[int]) -> Tensor:
            ids = torch.tensor([i for i in token_ids if 0 <= i < vocab_size], dtype=torch.int64)
            return torch.bincount(ids, minlength=vocab_size).to(torch.int32).to(device)

        return cls(
            params=params,
            bias_ids=torch.tensor([token_id for token_id, _ in bias], device=device) if bias else None,
            bias_values=torch.tensor([value for _, value in bias], dtype=torch.float32, device=device) if bias else None,
            prompt_seen=count(sequence.token_ids[: sequence.num_prompt_tokens]) > 0 if is_penalised else None,
            output_counts=count(sequence.token_ids[sequence.num_prompt_tokens :]) if is_penalised else None,
        )

    @property
    def path(self) -> SamplingPath:
        """How its rows are drawn."""
        if self.params.temperature == 0:
            return SamplingPath.GREEDY
        if self.params.top_k > 0:
            return SamplingPath.TOP_K
        return SamplingPath.RANKED if self.params.top_p < 1 or self.params.min_p > 0 else SamplingPath.PLAIN
