"""The sampler: every slot's parameters, random stream and penalty state, and the choice of a token per row.

Parameters live in persistent tensors, one row per slot, so a step only gathers them. Which path a row takes (greedy, plain,
filtered) follows from its own parameters alone; its batch mates cannot change its result. It knows nothing of pages.
"""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.sampling import (
    SamplingBatch,
    apply_penalties,
    logprobs,
    sample_filtered,
    sample_greedy,
    sample_plain,
)
from server.messages import SamplingParams, TokenLogprobs
from server.scheduler.plan import NewSequence, SampledToken, SlotFailure


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
class SamplingOutcome:
    """Choices for S rows.

    Attributes:
        token_ids: [S] int64 on the device; undefined for failed rows.
        sampled, failures: together one per row, in order.
    """

    token_ids: Tensor
    sampled: tuple[SampledToken, ...]
    failures: tuple[SlotFailure, ...]


class _Path(enum.Enum):
    """How a row is drawn. `TOP_K` ranks only the best logits, `RANKED` all of them."""

    GREEDY = enum.auto()
    PLAIN = enum.auto()
    TOP_K = enum.auto()
    RANKED = enum.auto()


@dataclass(frozen=True)
class _SlotSampling:
    """What the host knows of a slot. The tensors are None when its parameters do not need them.

    Attributes:
        params: as submitted.
        num_prompt_tokens: where the output begins.
        bias_ids, bias_values: [n] int64, [n] fp32.
        stop_ids: [m] int64, for min_tokens.
        prompt_seen: [V] bool.
        output_counts: [V] int32, updated with every token.
    """

    params: SamplingParams
    num_prompt_tokens: int
    bias_ids: Tensor | None
    bias_values: Tensor | None
    stop_ids: Tensor | None
    prompt_seen: Tensor | None
    output_counts: Tensor | None

    @property
    def path(self) -> _Path:
        if self.params.temperature == 0:
            return _Path.GREEDY
        if self.params.top_k > 0:
            return _Path.TOP_K
        return _Path.RANKED if self.params.top_p < 1 or self.params.min_p > 0 else _Path.PLAIN

    @property
    def has_penalties(self) -> bool:
        return self.output_counts is not None

    def masks_stops(self, position: int) -> bool:
        return self.stop_ids is not None and position - self.num_prompt_tokens < self.params.min_tokens


class Sampler:
    """Chooses tokens for the slots of one model."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, base_seed: int) -> None:
        """`base_seed` seeds the sequences without a seed of their own; it must be equal on all ranks."""
        self._vocab_size = vocab_size
        self._device = device
        self._base_seed = base_seed
        self._slots: dict[int, _SlotSampling] = {}
        self._temperature = torch.ones(max_num_seqs, dtype=torch.float32, device=device)
        self._top_p = torch.ones(max_num_seqs, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._seed = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def admit(self, sequence: NewSequence) -> None:
        """Set up the slot of a new or resumed sequence."""
        params, slot = sequence.sampling, sequence.slot
        self._temperature[slot] = params.temperature if params.temperature > 0 else 1.0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._top_k[slot] = params.top_k
        self._seed[slot] = self._seed_of(sequence)
        bias = [(token_id, value) for token_id, value in params.logit_bias if self._is_column(token_id)]
        stops = [token_id for token_id in params.stop_token_ids if self._is_column(token_id)]
        penalised = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        self._slots[slot] = _SlotSampling(
            params=params,
            num_prompt_tokens=sequence.num_prompt_tokens,
            bias_ids=self._tensor([token_id for token_id, _ in bias], torch.int64) if bias else None,
            bias_values=self._tensor([value for _, value in bias], torch.float32) if bias else None,
            stop_ids=self._tensor(stops, torch.int64) if params.min_tokens and stops else None,
            prompt_seen=self._count(sequence.token_ids[: sequence.num_prompt_tokens]) > 0 if penalised else None,
            output_counts=self._count(sequence.token_ids[sequence.num_prompt_tokens :]) if penalised else None,
        )

    def release(self, slot: int) -> None:
        """Forget a slot; one that holds nothing is ignored."""
        self._slots.pop(slot, None)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SamplingOutcome:
        """Choose one token per row.

        Args:
            logits: [S, V] fp32, not changed.
            rows: S rows, each slot at most once.
        """
        states = [self._slots[row.slot] for row in rows]
        is_finite = logits.isfinite().all(dim=-1)  # [S]
        token_ids = self._choose(self._adjust(logits, rows, states), rows, states)
        self._count_outputs(token_ids, states)
        ids, finite = torch.stack([token_ids, is_finite.to(torch.int64)]).tolist()
        details = self._logprobs(logits, token_ids, states)
        sampled, failures = [], []
        for i, row in enumerate(rows):
            if finite[i]:
                sampled.append(SampledToken(row.slot, ids[i], details.get(i)))
            else:
                failures.append(SlotFailure(row.slot, "the model's output was not finite"))
        return SamplingOutcome(token_ids, tuple(sampled), tuple(failures))

    def _adjust(self, logits: Tensor, rows: Sequence[SamplingRow], states: list[_SlotSampling]) -> Tensor:
        """Bias, penalties and min_tokens, in this order: [S, V]; a copy if anything changes."""
        biased = [i for i, state in enumerate(states) if state.bias_ids is not None]
        penalised = [i for i, state in enumerate(states) if state.has_penalties]
        masked = [i for i, state in enumerate(states) if state.masks_stops(rows[i].position)]
        if not (biased or penalised or masked):
            return logits
        logits = logits.clone()
        for i in biased:
            logits[i].index_add_(0, _given(states[i].bias_ids), _given(states[i].bias_values))
        if penalised:
            chosen = [states[i] for i in penalised]
            logits[penalised] = apply_penalties(
                logits[penalised],
                torch.stack([_given(state.prompt_seen) for state in chosen]),
                torch.stack([_given(state.output_counts) for state in chosen]),
                self._tensor([state.params.repetition_penalty for state in chosen], torch.float32),
                self._tensor([state.params.presence_penalty for state in chosen], torch.float32),
                self._tensor([state.params.frequency_penalty for state in chosen], torch.float32),
            )
        for i in masked:
            logits[i].index_fill_(0, _given(states[i].stop_ids), float("-inf"))
        return logits

    def _choose(self, logits: Tensor, rows: Sequence[SamplingRow], states: list[_SlotSampling]) -> Tensor:
        """[S] int64; each row by the path of its own parameters."""
        token_ids = sample_greedy(logits)
        paths: dict[_Path, list[int]] = {}
        for i, state in enumerate(states):
            paths.setdefault(state.path, []).append(i)
        for path, indices in paths.items():
            if path is _Path.GREEDY:
                continue
            index = self._tensor(indices, torch.int64)
            batch = self._batch([rows[i] for i in indices])
            if path is _Path.PLAIN:
                token_ids[index] = sample_plain(logits[index], batch)
            else:
                top_k = max(states[i].params.top_k for i in indices)
                num_candidates = top_k if path is _Path.TOP_K else self._vocab_size
                token_ids[index] = sample_filtered(logits[index], batch, num_candidates)
        return token_ids

    def _batch(self, rows: Sequence[SamplingRow]) -> SamplingBatch:
        slots = self._tensor([row.slot for row in rows], torch.int64)
        return SamplingBatch(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seed=self._seed[slots],
            position=self._tensor([row.position for row in rows], torch.int64),
        )

    def _count_outputs(self, token_ids: Tensor, states: list[_SlotSampling]) -> None:
        for i, state in enumerate(states):
            if state.output_counts is not None:
                state.output_counts[token_ids[i]] += 1

    def _logprobs(self, logits: Tensor, token_ids: Tensor, states: list[_SlotSampling]) -> dict[int, TokenLogprobs]:
        """By row, for the sequences that asked."""
        wanted = {i: state.params.num_logprobs for i, state in enumerate(states) if state.params.num_logprobs is not None}
        if not wanted:
            return {}
        index = self._tensor(list(wanted), torch.int64)
        choice, top_ids, top = (part.tolist() for part in logprobs(logits[index], token_ids[index], max(wanted.values())))
        return {
            i: TokenLogprobs(choice[n], tuple(top_ids[n][:num_top]), tuple(top[n][:num_top]))
            for n, (i, num_top) in enumerate(wanted.items())
        }

    def _seed_of(self, sequence: NewSequence) -> int:
        """A signed 64-bit seed; without one in the request it follows from the base seed and the request's id."""
        seed = sequence.sampling.seed
        if seed is None:
            digest = hashlib.blake2b(f"{self._base_seed}:{sequence.request_id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        return (seed + (1 << 63)) % (1 << 64) - (1 << 63)

    def _is_column(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size

    def _count(self, token_ids: list[int]) -> Tensor:
        """Occurrences, [V] int32; ids beyond the logits' width do not count."""
        ids = torch.tensor([i for i in token_ids if self._is_column(i)], dtype=torch.int64)
        return torch.bincount(ids, minlength=self._vocab_size).to(torch.int32).to(self._device)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the caller selected rows that have it"
    return tensor
