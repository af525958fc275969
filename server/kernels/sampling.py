"""Choosing tokens from logits: functions of tensors, the same on every device.

Every row depends on its own logits and parameters only, never on its batch mates: each random row takes one uniform number
from a counter-based generator (SplitMix64 over seed and position) and inverts its own cumulative distribution. Weights are
integers of 2^-44 of the best token's, so that sums are exact in any order; a token more than 31 nats below the best one (3e-14
of its probability) has none. A row that is not finite gets some valid id.
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from server.kernels.sampling_adjust import Adjustments, adjust_rows_torch

if TYPE_CHECKING:
    from server.kernels.sampling_triton import SamplingWorkspace

# SplitMix64 (Steele, Lea, Flood 2014): increment and the two multipliers of its finaliser, as signed 64-bit numbers.
INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)

UNIT = 1 << 44  # the weight of the best token
RANGE_NATS = 31
MAX_VOCAB_SIZE = 1 << 18  # times UNIT still fits 63 bits


class RowStatus(enum.IntEnum):
    """What came of a row."""

    CHOSEN = 0
    NOT_FINITE = 1
    NO_CHOICE = 2


class SamplingWork(enum.IntEnum):
    """How much the most demanding row of a batch takes; each includes the ones before."""

    GREEDY = 0
    PLAIN = 1
    FILTERED = 2


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


@dataclass(frozen=True)
class SamplingTable:
    """Parameters of N slots, on the logits' device.

    Attributes:
        floats: [N, 6] fp32: temperature (0 is greedy, otherwise a normal number), top_p, min_p, and the repetition, presence
            and frequency penalties.
        ints: [N, 4] int64: top_k, seed, row of the slot's token states and of its mask (-1 for none), see `Adjustments`.
    """

    floats: Tensor
    ints: Tensor

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device) -> "SamplingTable":
        """Slots with undefined parameters."""
        floats = torch.empty((num_slots, 6), dtype=torch.float32, device=device)
        return cls(floats, torch.empty((num_slots, 4), dtype=torch.int64, device=device))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's step: [S] int64 to [S] int64."""
    x = x + INCREMENT
    x = (x ^ _shift_right(x, 30)) * MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """One number in [0, 1) per row from (seed, position): [S] int64 each, [S] fp64 with 32 random bits."""
    return _shift_right(_mix(_mix(seed) ^ position), 32).to(torch.float64) * 2.0**-32


def _invert(cumulative: Tensor, batch: SamplingBatch) -> Tensor:
    """First index whose cumulative weight exceeds u * total, [S]; with u < 1 it always has a weight of its own."""
    target = (uniform(batch.seed, batch.position) * cumulative[:, -1].to(torch.float64)).to(torch.int64)
    index = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return index.clamp(max=cumulative.shape[1] - 1)


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - max) / temperature) in units, [S, n] int64; the maximum goes first, so tiny temperatures stay finite."""
    exponents = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    in_range = exponents > -RANGE_NATS  # false for NaN
    weights = exponents.where(in_range, 0.0).to(torch.float64).exp() * UNIT + 0.5
    return weights.to(torch.int64) * in_range


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
    keep &= weights >= batch.min_p[:, None].to(torch.float64) * UNIT
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
    mass = batch.top_p.to(torch.float64) * cumulative[:, -1].to(torch.float64)
    limit = mass.ceil().to(torch.int64).clamp(min=1)[:, None]
    in_top_p = (cumulative - weights < limit) | (batch.top_p[:, None] >= 1)
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


def sample_rows_torch(
    logits: Tensor,
    table: SamplingTable,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    adjustments: Adjustments | None = None,
) -> None:
    """Twin of `sample_rows`."""
    logits = logits.float()
    is_finite = logits.isfinite().all(dim=-1)
    if adjustments is not None:
        logits = adjust_rows_torch(logits, table.floats[slots, 3:], table.ints[slots, 2:], adjustments)
    token_ids = sample_greedy(logits)
    temperature, top_p, min_p, *_ = table.floats[slots].unbind(1)
    top_k, seed, state_rows, _ = table.ints[slots].unbind(1)
    batch = SamplingBatch(temperature, top_k, top_p, min_p, seed, positions)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    has_head = filtered & (top_k > 0)
    kinds = (~filtered, 0), (has_head, max([1, *top_k.tolist()])), (filtered & ~has_head, logits.shape[1])
    for rows, num_candidates in kinds:
        index = ((temperature > 0) & rows).nonzero().squeeze(1)
        if index.numel():
            some = SamplingBatch(**{name: column[index] for name, column in vars(batch).items()})
            chosen = (
                sample_filtered(logits[index], some, num_candidates) if num_candidates else sample_plain(logits[index], some)
            )
            token_ids[index] = chosen
    has_choice = logits.amax(dim=-1) > float("-inf")
    out[0] = token_ids
    out[1] = torch.where(is_finite, torch.where(has_choice, RowStatus.CHOSEN, RowStatus.NO_CHOICE), RowStatus.NOT_FINITE)
    if adjustments is not None:
        counted = state_rows >= 0
        adjustments.token_states[state_rows[counted], token_ids[counted]] += 2


def sample_rows(
    logits: Tensor,
    table: SamplingTable,
    slots: Tensor,
    positions: Tensor,
    work: SamplingWork,
    out: Tensor,
    workspace: "SamplingWorkspace | None" = None,
    adjustments: Adjustments | None = None,
) -> None:
    """Choose one token per row. On a GPU it only launches kernels, whose grids depend on shapes alone, so a graph may hold it.

    Args:
        logits: [S, V], any floating dtype, rows contiguous, not changed; V up to MAX_VOCAB_SIZE.
        table: parameters by slot.
        slots: [S] int64, each at most once.
        positions: [S] int64, of the tokens to choose.
        work: at least what the rows' parameters take.
        out: [2, S] int64, written: token ids (some valid id for a failed row) and `RowStatus`.
        workspace: for S rows of V logits; needed on a GPU.
        adjustments: what changes logits before the choice; then the chosen tokens are counted in the token states.
    """
    if logits.is_cuda:
        from server.kernels.sampling_triton import sample_rows_triton

        assert workspace is not None
        sample_rows_triton(logits, table, slots, positions, work, out, workspace, adjustments)
    else:
        sample_rows_torch(logits, table, slots, positions, out, adjustments)


def logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the model's own distribution.

    Args:
        logits: [R, V], any floating dtype, as the model gave them.
        ids: [R] int64, the chosen tokens.
        num_top: alternatives, >= 0.

    Returns:
        logprob of the choice [R] fp32, ids of the best alternatives [R, num_top] best first, their logprobs [R, num_top] fp32.
    """
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    top, top_ids = log_probabilities.topk(min(num_top, logits.shape[-1]), dim=-1)
    return log_probabilities.gather(1, ids[:, None]).squeeze(1), top_ids, top
