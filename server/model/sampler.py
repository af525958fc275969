"""The sampler: every slot's parameters, random stream and penalty state, and the choice of a token per row.

A row's logits pass bias, penalties and the rules of `constraints`, and then one token is drawn. Parameters live in a
persistent table, one row per slot, so a step only sends which slots it samples. What a row chooses follows from its own
logits and parameters alone. It knows nothing of pages.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from server.kernels.sampling import MAX_VOCAB_SIZE, SamplingTable, SamplingWork, logprobs, sample_rows
from server.kernels.sampling_adjust import Adjustments
from server.model.constraints import Constraints, Limits
from server.model.grammar import GrammarCompiler
from server.model.pending_sample import HostBuffers, PendingSample
from server.model.row_pool import RowPool, copy_from_host
from server.model.sampling_slot import SamplingRow, SamplingSlot, token_states, work_of
from server.scheduler.plan import NewSequence

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


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
            max_num_seqs: slots, and rows of a step at most.
            vocab_size: width of the logits, V.
            device: of the logits.
            base_seed: seeds the sequences without a seed of their own; it must be equal on all ranks.
            compiler: without one, every sequence with a grammar fails.
        """
        assert vocab_size <= MAX_VOCAB_SIZE, "sums of weights must fit 63 bits"
        self._vocab_size = vocab_size
        self._device = device
        self._base_seed = base_seed
        self._constraints = Constraints(vocab_size, device, compiler)
        self._slots: dict[int, SamplingSlot] = {}
        self._states = RowPool(vocab_size, torch.int32, device)
        self._table = SamplingTable.allocate(max_num_seqs, device)
        self._max_num_seqs = max_num_seqs
        self._where = torch.empty(2 * max_num_seqs, dtype=torch.int64, device=device)
        self._free_buffers: list[HostBuffers] = []
        self._workspace = None
        if device.type == "cuda":
            from server.kernels.sampling_triton import SamplingWorkspace

            self._workspace = SamplingWorkspace.allocate(max_num_seqs, vocab_size, device)

    def admit(self, sequence: NewSequence) -> None:
        """Set up the slot of a new or resumed sequence."""
        params, slot = sequence.sampling, sequence.slot
        states = token_states(sequence, self._vocab_size)
        state_row = None if states is None else self._states.take(states)
        bias = tuple((token_id, value) for token_id, value in params.logit_bias if 0 <= token_id < self._vocab_size)
        self._constraints.admit(sequence)
        follow = self._constraints.follower(slot)
        self._slots[slot] = SamplingSlot(work_of(params), bias, params.num_logprobs, state_row, follow)
        temperature = max(params.temperature, _LEAST_TEMPERATURE) if params.temperature > 0 else 0.0
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        pool_rows = (-1 if row is None else row for row in (state_row, self._constraints.mask_row(slot)))
        copy_from_host(self._table.floats[slot], torch.tensor([temperature, params.top_p, params.min_p, *penalties]))
        copy_from_host(self._table.ints[slot], torch.tensor([params.top_k, self._seed_of(sequence), *pool_rows]))

    def release(self, slot: int) -> None:
        """Forget a slot; one that holds nothing is ignored."""
        state = self._slots.pop(slot, None)
        if state is not None and state.state_row is not None:
            self._states.give_back(state.state_row)
        self._constraints.release(slot)

    def needs_history(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether `launch` for these rows needs the earlier tokens of one of them on the host.

        Then every earlier `PendingSample` must have been waited for.
        """
        return any(self._slots[row.slot].follow is not None for row in rows)

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> PendingSample:
        """Begin to choose one token per row, in the order of the current stream; never waits for the device.

        Args:
            logits: [S, V], any floating dtype, not changed.
            rows: S rows, each slot at most once.
        """
        assert logits.shape[0] == len(rows), "one row of logits for each row"
        states = [self._slots[row.slot] for row in rows]
        limits = self._constraints.limits(rows)
        buffers = self._free_buffers.pop() if self._free_buffers else HostBuffers(self._max_num_seqs, self._device)
        slots, positions = buffers.send([row.slot for row in rows], [row.position for row in rows], self._where)
        adjustments: Adjustments | None = None
        if limits.change_logits or any(state.bias or state.state_row is not None for state in states):
            adjustments = self._adjustments(states, limits)
        out = torch.empty((2, len(rows)), dtype=torch.int64, device=self._device)
        work = max((state.work for state in states), default=SamplingWork.GREEDY)
        sample_rows(logits, self._table, slots, positions, work, out, self._workspace, adjustments)
        scores = self._logprobs(logits, out[0], states)
        buffers.fetch(out)
        return PendingSample(out[0], rows, states, limits.faults, scores, buffers, self._free_buffers)

    def _adjustments(self, states: list[SamplingSlot], limits: Limits) -> Adjustments:
        """What changes the logits of these rows; its integers travel in one copy."""
        num_rows = len(states)
        edits = [(i, token_id, value) for i, state in enumerate(states) for token_id, value in state.bias]
        edits += [(i, token_id, float("-inf")) for i, token_id in limits.forbidden]
        edits.sort(key=lambda edit: edit[0])
        counts = [0] * (num_rows + 1)
        for i, _, _ in edits:
            counts[i + 1] += 1
        grammar_rows = limits.grammar_rows or (-1,) * num_rows
        integers = [*grammar_rows, *accumulate(counts), *(token_id for _, token_id, _ in edits)]
        parts = torch.split(self._to_device(torch.tensor(integers)), [num_rows, num_rows + 1, len(edits)])
        masks = self._constraints.masks
        return Adjustments(
            edit_starts=parts[1],
            edit_ids=parts[2],
            edit_values=self._to_device(torch.tensor([value for _, _, value in edits], dtype=torch.float32)),
            token_states=self._states.tensor,
            masks=masks,
            grammar_rows=parts[0],
            grammar_masks=masks if limits.grammar_masks is None else self._to_device(limits.grammar_masks),
        )

    def _logprobs(self, logits: Tensor, token_ids: Tensor, states: list[SamplingSlot]) -> tuple[Tensor, ...]:
        """What `logprobs` returns for the rows that want them, on its way to the host; nothing when none does."""
        wanted = [i for i, state in enumerate(states) if state.num_logprobs is not None]
        if not wanted:
            return ()
        if len(wanted) < len(states):
            index = self._to_device(torch.tensor(wanted))
            logits, token_ids = logits[index], token_ids[index]
        parts = logprobs(logits, token_ids, max(state.num_logprobs or 0 for state in states))
        return tuple(self._to_host(part) for part in parts)

    def _seed_of(self, sequence: NewSequence) -> int:
        """A signed 64-bit seed; without one in the request it follows from the base seed and the request's id."""
        seed = sequence.sampling.seed
        if seed is None:
            digest = hashlib.blake2b(f"{self._base_seed}:{sequence.request_id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        return (seed + (1 << 63)) % (1 << 64) - (1 << 63)

    def _to_device(self, host: Tensor) -> Tensor:
        """The host waits for nothing: the memory it copies from is pinned."""
        if self._device.type != "cuda":
            return host
        pinned = host if host.is_pinned() else host.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """The copy is there when the stream has come so far."""
        if self._device.type != "cuda":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
