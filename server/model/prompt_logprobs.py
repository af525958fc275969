"""Log-probabilities of prompt tokens, for the sequences that ask for them, chunk by chunk as their prompts are computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.sampling import logprobs
from server.messages import TokenLogprobs
from server.scheduler.plan import Chunk, NewSequence, PromptLogprobs, SlotFailure

# Logits of so many positions at a time: of 200,000 tokens their log-probabilities are 100 MB.
ROWS_PER_BLOCK = 128


@dataclass(frozen=True)
class _Prompt:
    token_ids: Tensor  # [n] int64
    num_top: int


class PromptScorer:
    """The prompts to score, by slot."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._prompts: dict[int, _Prompt] = {}

    def admit(self, sequence: NewSequence) -> None:
        """Keep the prompt if its log-probabilities are wanted; one that has output already has sent them."""
        num_top = sequence.sampling.num_prompt_logprobs
        if num_top is not None and len(sequence.token_ids) == sequence.num_prompt_tokens:
            token_ids = torch.tensor(sequence.token_ids, dtype=torch.int64, device=self._device)
            self._prompts[sequence.slot] = _Prompt(token_ids, num_top)

    def release(self, slot: int) -> None:
        """Forget a slot; one that holds nothing is ignored."""
        self._prompts.pop(slot, None)

    def score(
        self, chunks: Sequence[Chunk], hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
    ) -> tuple[list[PromptLogprobs], list[SlotFailure]]:
        """Score the prompt tokens that follow the positions of `chunks`.

        Args:
            chunks: of the step, in the order of the rows.
            hidden: [T, hidden], after the final norm.
            logits_of: [S, hidden] to [S, V].
        """
        entries: list[PromptLogprobs] = []
        failures: list[SlotFailure] = []
        first_row = 0
        for chunk in chunks if self._prompts else ():
            prompt = self._prompts.get(chunk.slot)
            num_rows = 0 if prompt is None else min(chunk.num_tokens, len(prompt.token_ids) - 1 - chunk.start)
            if prompt is not None and num_rows > 0:
                start = chunk.start + 1
                rows = hidden[first_row : first_row + num_rows]
                scores = _score(rows, prompt.token_ids[start : start + num_rows], prompt.num_top, logits_of)
                if scores is None:
                    failures.append(SlotFailure(chunk.slot, "the model's output for the prompt was not finite"))
                else:
                    entries.append(PromptLogprobs(chunk.slot, start, tuple(scores)))
            first_row += chunk.num_tokens
        return entries, failures


def _score(
    hidden: Tensor, token_ids: Tensor, num_top: int, logits_of: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs] | None:
    """One entry per row of `hidden`; None when a logit is not finite."""
    scores: list[TokenLogprobs] = []
    for rows, ids in zip(torch.split(hidden, ROWS_PER_BLOCK), torch.split(token_ids, ROWS_PER_BLOCK), strict=True):
        logits = logits_of(rows)
        if not logits.isfinite().all():
            return None
        chosen, top_ids, top = (part.tolist() for part in logprobs(logits, ids, num_top))
        scores += map(TokenLogprobs, chosen, map(tuple, top_ids), map(tuple, top))
    return scores
