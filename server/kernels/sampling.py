"""Choosing tokens from logits: pure functions of tensors, the same on every device.

Every row depends on its own logits and parameters only, never on its batch mates: each random row takes one uniform number
from a counter-based generator (SplitMix64 over seed and position) and inverts its own cumulative distribution. A row that is
not finite gets some valid id; finding such rows is the caller's business.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014): increment and the two multipliers of its finaliser, as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of S rows, on the logits' device.

    Attributes:
        temperature: [S] fp32, > 0.
        top_k: [S] int64; 0 is off.
        top_p: [S] fp32 in (0, 1]; 1 is off.
        min_p: [S] fp32 in [0, 1]; 0 is off.
        seed: [S] int64.
        position: [S] int64, position of the token to choose; the counter of the row's random stream.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's step: [S] int64 to [S] int64."""
    x = x + _INCREMENT
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """One number in [0, 1) per row from (seed, position): [S] int64 each, [S] fp64 with 32 random bits."""
    return _shift_right(_mix(_mix(seed) ^ position), 32).to(torch.float64) * 2.0**-32


def _invert(cumulative: Tensor, batch: SamplingBatch) -> Tensor:
    """First index whose cumulative weight exceeds u * total, [S]; with u < 1 it always has a weight of its own."""
    target = uniform(batch.seed, batch.position) * cumulative[:, -1]
    index = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return index.clamp(max=cumulative.shape[1] - 1)


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - max) / temperature), [S, n] fp64; the maximum goes first, so tiny temperatures stay finite."""
    shifted = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    return shifted.to(torch.float64).exp_()


def sample_plain(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw from softmax(logits / temperature): [S, V] fp32 to [S] int64. Ignores top_k, top_p and min_p."""
    return _invert(_weights(logits, batch.temperature).cumsum(dim=-1), batch)


def sample_filtered(logits: Tensor, batch: SamplingBatch, num_candidates: int) -> Tensor:
    """Draw after top_k, then top_p, then min_p: [S, V] fp32 to [S] int64.

    top_p counts the mass that top_k left. Candidates are ranked by logit, equal ones by id, so each filter keeps the head of
    the ranking, and the best candidate always stays. Only the sorted values are used, never the order in which a sort leaves
    equal ones; so the result does not depend on `num_candidates`.

    Args:
        logits: [S, V] fp32.
        batch: S rows.
        num_candidates: how many of the best logits to rank: at least every row's top_k, and V if a row has none.
    """
    weights = _weights(logits, batch.temperature)
    keep = _in_head(logits, _find_head(logits, batch, num_candidates))
    keep &= weights >= batch.min_p[:, None] * weights.amax(dim=-1, keepdim=True)
    return _invert((weights * keep).cumsum(dim=-1), batch)


@dataclass(frozen=True)
class _Head:
    """The first tokens of each row's ranking: `num_kept` [S] int64 of them, the last one with logit `last` [S]."""

    num_kept: Tensor
    last: Tensor


def _find_head(logits: Tensor, batch: SamplingBatch, num_candidates: int) -> _Head:
    """How many tokens top_k and top_p leave in each row."""
    ordered = logits.topk(min(num_candidates, logits.shape[1]), dim=-1).values  # [S, C] descending
    rank = torch.arange(ordered.shape[1], device=logits.device)
    in_top_k = (rank < batch.top_k[:, None]) | (batch.top_k[:, None] == 0)
    weights = _weights(ordered, batch.temperature) * in_top_k
    cumulative = weights.cumsum(dim=-1)
    mass_before = cumulative - weights
    in_top_p = (mass_before < batch.top_p[:, None] * cumulative[:, -1:]) | (batch.top_p[:, None] >= 1)
    num_kept = (in_top_k & in_top_p).sum(dim=-1).clamp(min=1)
    return _Head(num_kept, ordered.gather(1, num_kept[:, None] - 1).squeeze(1))


def _in_head(logits: Tensor, head: _Head) -> Tensor:
    """[S, V] bool: above the head's last logit, or equal to it with one of the lowest ids."""
    above = logits > head.last[:, None]
    equal = logits == head.last[:, None]
    num_equal_kept = head.num_kept - above.sum(dim=-1)
    return above | (equal & (equal.cumsum(dim=-1) <= num_equal_kept[:, None]))


def sample_greedy(logits: Tensor) -> Tensor:
    """The id of the largest logit, the lowest one on ties: [S, V] to [S] int64."""
    return logits.argmax(dim=-1)


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


def logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the model's own distribution.

    Args:
        logits: [R, V] fp32, as the model gave them.
        ids: [R] int64, the chosen tokens.
        num_top: alternatives, >= 0.

    Returns:
        logprob of the choice [R], ids of the best alternatives [R, num_top] best first, their logprobs [R, num_top].
    """
    log_probabilities = torch.log_softmax(logits, dim=-1)
    top, top_ids = log_probabilities.topk(min(num_top, logits.shape[-1]), dim=-1)
    return log_probabilities.gather(1, ids[:, None]).squeeze(1), top_ids, top
