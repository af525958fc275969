"""What changes logits before a token is chosen: bias, penalties, and masks of what may be chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adjustments:
    """Changes of S rows, on the logits' device.

    Attributes:
        edit_starts: [S + 1] int64, row i has the edits from `edit_starts[i]` to `edit_starts[i + 1]`.
        edit_ids: [E] int64, ids below V.
        edit_values: [E] fp32, added to the logit; -inf forbids the token.
        token_states: [P, V] int32: twice the occurrences among generated tokens, plus one for a token of the prompt. Which row
            belongs to a slot is in the sampling table, as for `masks`.
        masks: [M, ceil(V / 32)] int32; bit i of word w allows token 32 w + i.
        grammar_rows: [S] int64, row of `grammar_masks`, -1 for none.
        grammar_masks: [G, ceil(V / 32)] int32, G >= 1.
    """

    edit_starts: Tensor
    edit_ids: Tensor
    edit_values: Tensor
    token_states: Tensor
    masks: Tensor
    grammar_rows: Tensor
    grammar_masks: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return tuple(vars(self).values())


def adjust_rows_torch(logits: Tensor, penalties: Tensor, pool_rows: Tensor, adjustments: Adjustments) -> Tensor:
    """Logits after edits, penalties and masks, in this order: [S, V] fp32, new.

    Args:
        logits: [S, V] fp32.
        penalties: [S, 3] fp32: repetition, presence, frequency.
        pool_rows: [S, 2] int64: row of the token states and of the masks, -1 for none.
        adjustments: of these rows.
    """
    num_edits = adjustments.edit_starts.diff()
    edited = torch.arange(len(num_edits), device=logits.device).repeat_interleave(num_edits)
    values = adjustments.edit_values
    logits = logits.index_put((edited, adjustments.edit_ids[: len(edited)]), values[: len(edited)], accumulate=True)
    state_rows, mask_rows = pool_rows.unbind(1)
    index = (state_rows >= 0).nonzero().squeeze(1)
    states = adjustments.token_states[state_rows[index]]
    logits[index] = apply_penalties(logits[index], states & 1 == 1, states >> 1, *penalties[index].unbind(1))
    for rows, masks in (mask_rows, adjustments.masks), (adjustments.grammar_rows, adjustments.grammar_masks):
        index = (rows >= 0).nonzero().squeeze(1)
        logits[index] = keep_tokens(logits[index], masks[rows[index]])
    return logits


def apply_penalties(
    logits: Tensor, prompt_seen: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Penalised logits, [R, V] fp32.

    Repetition (Keskar et al. 2019, CTRL) divides positive and multiplies negative logits of tokens of the prompt or the
    output; then presence and frequency (OpenAI's API reference) subtract from tokens of the output.

    Args:
        logits: [R, V] fp32.
        prompt_seen: [R, V] bool.
        output_counts: [R, V] int32, occurrences among generated tokens.
        repetition: [R] fp32, 1 is off.
        presence: [R] fp32, 0 is off.
        frequency: [R] fp32, 0 is off.
    """
    generated = output_counts > 0
    factor = torch.where(prompt_seen | generated, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - generated * presence[:, None] - output_counts * frequency[:, None]


def keep_tokens(logits: Tensor, mask: Tensor) -> Tensor:
    """-inf where a token's bit is not set: [R, V] fp32.

    Args:
        logits: [R, V] fp32.
        mask: [R, ceil(V / 32)] int32; bit i of word w is token 32 w + i.
    """
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_kept = ((mask[:, :, None] >> bits) & 1).bool().flatten(1)  # [R, 32 * ceil(V / 32)]
    return logits.masked_fill(~is_kept[:, : logits.shape[1]], float("-inf"))
