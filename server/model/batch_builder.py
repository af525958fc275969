"""Persistent state of the runner's slots, and the attention batch of a step built from it.

A slot holds the token ids that its sequence came with, the token sampled last, and its page table. Later tokens never come
from the host: a decode step reads its input from `last_token` on the device. It knows neither the model nor sampling.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.scheduler.plan import Chunk, NewSequence


@dataclass(frozen=True)
class ModelInput:
    """One step's input.

    Attributes:
        token_ids: [T] int64.
        batch: positions, pages and lengths; sequence b belongs to chunk b.
        sample_rows: [S] int64, rows of T after which a token is sampled, in the order of the chunks.
    """

    token_ids: Tensor
    batch: AttentionBatch
    sample_rows: Tensor


class BatchBuilder:
    """State of `max_num_seqs` slots and the batches made from it."""

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        """`max_model_len` bounds a sequence's length, and with it the width of the page table."""
        max_pages = -(-max_model_len // page_size)
        self._page_size = page_size
        self._device = device
        self._token_ids: dict[int, Tensor] = {}  # slot -> [n] int64 on the host
        self._num_pages = [0] * max_num_seqs
        self._page_table = torch.zeros((max_num_seqs, max_pages), dtype=torch.int32, device=device)
        self._last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def admit(self, sequence: NewSequence) -> None:
        """Take the slot; its page table starts empty."""
        self._token_ids[sequence.slot] = torch.tensor(sequence.token_ids, dtype=torch.int64)
        self._num_pages[sequence.slot] = 0

    def release(self, slot: int) -> None:
        """Forget the slot's tokens; a slot that holds nothing is ignored."""
        self._token_ids.pop(slot, None)

    def append_pages(self, chunks: Iterable[Chunk]) -> list[int]:
        """Extend the page tables by the chunks' new pages.

        Returns:
            Those of the new pages that hold nothing yet; the others came from the prefix cache.
        """
        slots: list[int] = []
        columns: list[int] = []
        page_ids: list[int] = []
        fresh: list[int] = []
        for chunk in chunks:
            num_valid = -(-chunk.start // self._page_size)
            for column, page_id in enumerate(chunk.new_page_ids, start=self._num_pages[chunk.slot]):
                slots.append(chunk.slot)
                columns.append(column)
                page_ids.append(page_id)
                if column >= num_valid:
                    fresh.append(page_id)
            self._num_pages[chunk.slot] += len(chunk.new_page_ids)
        if page_ids:
            where = self._to_device(torch.tensor([slots, columns]))
            self._page_table[where[0], where[1]] = self._to_device(torch.tensor(page_ids, dtype=torch.int32))
        return fresh

    def build(self, chunks: Sequence[Chunk]) -> ModelInput:
        """The input of a step over `chunks` (at least one, single-token chunks first)."""
        lengths = [chunk.num_tokens for chunk in chunks]
        num_decodes = sum(length == 1 for length in lengths)
        seq_lens = [chunk.start + chunk.num_tokens for chunk in chunks]
        host = torch.tensor([[chunk.slot for chunk in chunks], [chunk.start for chunk in chunks], lengths])
        ends = host[2].cumsum(0)
        samples = torch.tensor([chunk.samples for chunk in chunks])
        slots, starts, counts, ends_on_device = self._to_device(torch.cat([host, ends[None]])).unbind(0)  # [B] each
        query_start = torch.nn.functional.pad(ends_on_device, (1, 0))
        num_tokens = sum(lengths)
        sequence_of_token = torch.arange(len(chunks), device=self._device).repeat_interleave(counts, output_size=num_tokens)
        offsets = torch.arange(num_tokens, device=self._device) - query_start[sequence_of_token]
        positions = starts[sequence_of_token] + offsets
        num_columns = -(-max(seq_lens) // self._page_size)
        page_table = self._page_table[slots, :num_columns]
        pages = page_table[sequence_of_token, positions // self._page_size].to(torch.int64)
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=pages * self._page_size + positions % self._page_size,
            query_start=query_start.to(torch.int32),
            seq_lens=(starts + counts).to(torch.int32),
            page_table=page_table,
            sequence_of_token=sequence_of_token.to(torch.int32),
            num_decodes=num_decodes,
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
            page_size=self._page_size,
        )
        return ModelInput(self._gather_token_ids(chunks, num_decodes, slots), batch, self._to_device(ends[samples] - 1))

    def set_last_tokens(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Remember the tokens just sampled: `token_ids` [S] int64 on the device."""
        self._last_token[self._to_device(torch.tensor(slots))] = token_ids

    def _gather_token_ids(self, chunks: Sequence[Chunk], num_decodes: int, slots: Tensor) -> Tensor:
        """[T] int64: tokens the sequence came with from the host, sampled ones from the device."""
        known = [self._token_ids[chunk.slot][chunk.start : chunk.start + chunk.num_tokens] for chunk in chunks]
        is_sampled = [part.numel() == 0 for part in known]
        placeholder = torch.zeros(1, dtype=torch.int64)
        token_ids = torch.cat([placeholder if empty else part for part, empty in zip(known, is_sampled, strict=True)])
        token_ids = self._to_device(token_ids)
        if any(is_sampled):
            head = slice(0, num_decodes)
            from_device = self._to_device(torch.tensor(is_sampled[head]))
            token_ids[head] = torch.where(from_device, self._last_token[slots[head]], token_ids[head])
        return token_ids

    def _to_device(self, host: Tensor) -> Tensor:
        if self._device.type == "cuda":
            return host.pin_memory().to(self._device, non_blocking=True)
        return host.to(self._device)
