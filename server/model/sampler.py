"""The sampler: every slot's parameters, random stream and penalty state, and the choice of a token per row.

A row's logits pass bias and penalties, then the rules of `constraints`, and then one token is drawn. Parameters live in
persistent tensors, one row per slot, so a step only gathers them. Which path a row takes (greedy, plain, filtered) follows
from its own parameters alone; its batch mates cannot change its result. It knows nothing of pages.
"""

import hashlib
from collections.abc import Callable, Sequence

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
from server.messages import TokenLogprobs
from server.model.constraints import Constraints
from server.model.grammar import GrammarCompiler
from server.model.sampling_slot import SamplingPath, SamplingRow, SamplingSlot
from server.scheduler.plan import NewSequence, SampledToken, SlotFailure

NOT_FINITE = "the model's output was not finite"
NO_CHOICE = "the request's rules leave no token to choose"

SampleResult = tuple[tuple[SampledToken, ...], tuple[SlotFailure, ...]]


class PendingSample:
    """Choices for S rows that the device may still be making.

    Attributes:
        token_ids: [S] int64 on the device, valid in the order of the stream; undefined for failed rows.
    """

    def __init__(self, token_ids: Tensor, read: Callable[[], SampleResult]) -> None:
        self.token_ids = token_ids
        self._read = read
        self._result: SampleResult | None = None

    def wait(self) -> SampleResult:
        """The choices and the failures, together one per row, in order; the grammars of the rows take their tokens.

        Waits for the device. Slots that were released or taken anew in the meantime do not matter. A second call returns
        the same result and changes nothing.
        """
        if self._result is None:
            self._result = self._read()
        return self._result


class Sampler:
    """Chooses tokens for the slots of one model."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        base_seed: int,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        """Allocate the slots.

        Args:
            max_num_seqs: slots.
            vocab_size: width of the logits, V.
            device: of the logits.
            base_seed: seeds the sequences without a seed of their own; it must be equal on all ranks.
            compiler: without one, every sequence with a grammar fails.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._base_seed = base_seed
        self._constraints = Constraints(max_num_seqs, vocab_size, device, compiler)
        self._slots: dict[int, SamplingSlot] = {}
        self._temperature = torch.ones(max_num_seqs, dtype=torch.float32, device=device)
        self._top_p = torch.ones(max_num_seqs, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._seed = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def admit(self, sequence: NewSequence) -> None:
        """Set up the slot of a new or resumed sequence."""
        params, slot = sequence.sampling, sequence.slot
        self._temperature[slot] = params.temperature if params.temperature > 0 else 1.0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._top_k[slot] = params.top_k
        self._seed[slot] = self._seed_of(sequence)
        self._slots[slot] = SamplingSlot.of(sequence, self._vocab_size, self._device)
        self._constraints.admit(sequence)

    def release(self, slot: int) -> None:
        """Forget a slot; one that holds nothing is ignored."""
        self._slots.pop(slot, None)
        self._constraints.release(slot)

    def needs_history(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether `launch` for these rows needs the earlier tokens of one of them on the host.

        Then every earlier `PendingSample` must have been waited for.
        """
        return self._constraints.need_history(rows)

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> PendingSample:
        """Begin to choose one token per row, without waiting for the device.

        Args:
            logits: [S, V] fp32, not changed.
            rows: S rows, each slot at most once.
        """
        states = [self._slots[row.slot] for row in rows]
        is_finite = logits.isfinite().all(dim=-1)  # [S]
        constrained = self._constraints.apply(self._adjust(logits, states), rows)
        has_choice = is_finite if constrained.has_choice is None else constrained.has_choice
        token_ids = self._choose(constrained.logits, rows, states)
        self._count_outputs(token_ids, states)
        flags = torch.stack([token_ids, is_finite.to(torch.int64), has_choice.to(torch.int64)])
        details = self._logprobs(logits, token_ids, states)
        advance = [self._constraints.follower(row.slot) for row in rows]

        def read() -> SampleResult:
            ids, finite, choosable = flags.tolist()
            logprobs_of = details()
            sampled, failures = [], []
            for i, row in enumerate(rows):
                fault = NOT_FINITE if not finite[i] else constrained.faults.get(i, None if choosable[i] else NO_CHOICE)
                if fault is not None:
                    failures.append(SlotFailure(row.slot, fault))
                    continue
                advance[i](ids[i])
                sampled.append(SampledToken(row.slot, ids[i], logprobs_of.get(i)))
            return tuple(sampled), tuple(failures)

        return PendingSample(token_ids, read)

    def _adjust(self, logits: Tensor, states: list[SamplingSlot]) -> Tensor:
        """Bias, then penalties: [S, V]; a copy if anything changes."""
        biased = [i for i, state in enumerate(states) if state.bias_ids is not None]
        penalised = [i for i, state in enumerate(states) if state.output_counts is not None]
        if not (biased or penalised):
            return logits
        logits = logits.clone()
        for i in biased:
            logits[i].index_add_(0, _given(states[i].bias_ids), _given(states[i].bias_values))
        if penalised:
            chosen = [states[i] for i in penalised]
            index = self._tensor(penalised, torch.int64)
            logits[index] = apply_penalties(
                logits[index],
                torch.stack([_given(state.prompt_seen) for state in chosen]),
                torch.stack([_given(state.output_counts) for state in chosen]),
                self._tensor([state.params.repetition_penalty for state in chosen], torch.float32),
                self._tensor([state.params.presence_penalty for state in chosen], torch.float32),
                self._tensor([state.params.frequency_penalty for state in chosen], torch.float32),
            )
        return logits

    def _choose(self, logits: Tensor, rows: Sequence[SamplingRow], states: list[SamplingSlot]) -> Tensor:
        """[S] int64; each row by the path of its own parameters."""
        token_ids = sample_greedy(logits)
        paths: dict[SamplingPath, list[int]] = {}
        for i, state in enumerate(states):
            paths.setdefault(state.path, []).append(i)
        for path, indices in paths.items():
            if path is SamplingPath.GREEDY:
                continue
            index = self._tensor(indices, torch.int64)
            batch = self._batch([rows[i] for i in indices])
            if path is SamplingPath.PLAIN:
                token_ids[index] = sample_plain(logits[index], batch)
            else:
                top_k = max(states[i].params.top_k for i in indices)
                num_candidates = top_k if path is SamplingPath.TOP_K else self._vocab_size
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

    def _count_outputs(self, token_ids: Tensor, states: list[SamplingSlot]) -> None:
        for i, state in enumerate(states):
            if state.output_counts is not None:
                # Not `output_counts[token_ids[i]] += 1`: indexing with a scalar tensor waits for the device.
                state.output_counts.index_add_(0, token_ids[i : i + 1], self._one)

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, states: list[SamplingSlot]
    ) -> Callable[[], dict[int, TokenLogprobs]]:
        """Reads them by row, for the sequences that asked."""
        wanted = {i: state.params.num_logprobs for i, state in enumerate(states) if state.params.num_logprobs is not None}
        if not wanted:
            return dict
        index = self._tensor(list(wanted), torch.int64)
        parts = logprobs(logits[index], token_ids[index], max(wanted.values()))

        def read() -> dict[int, TokenLogprobs]:
            choice, top_ids, top = (part.tolist() for part in parts)
            return {
                i: TokenLogprobs(choice[n], tuple(top_ids[n][:num_top]), tuple(top[n][:num_top]))
                for n, (i, num_top) in enumerate(wanted.items())
            }

        return read

    def _seed_of(self, sequence: NewSequence) -> int:
        """A signed 64-bit seed; without one in the request it follows from the base seed and the request's id."""
        seed = sequence.sampling.seed
        if seed is None:
            digest = hashlib.blake2b(f"{self._base_seed}:{sequence.request_id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        return (seed + (1 << 63)) % (1 << 64) - (1 << 63)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the caller selected rows that have it"
    return tensor
