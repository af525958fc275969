"""Persistent state of the runner's slots, and the attention batch of a step built from it.

A slot holds the token ids that its sequence came with, the token sampled last, and its page table. Later tokens never come
from the host: a decode step reads its input from `last_token` on the device. What a step needs from the host goes there in one
copy. It knows neither the model nor sampling.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.scheduler.plan import Chunk, NewSequence

SAMPLED = -1  # in place of a token id: the one sampled last


@dataclass(frozen=True)
class ModelInput:
    """One step's input.

    Attributes:
        token_ids: [T] int64.
        batch: positions, pages and lengths; sequence b belongs to chunk b.
        slots: [B] int64, of the chunks.
    """

    token_ids: Tensor
    batch: AttentionBatch
    slots: Tensor


def host_buffer(host: Tensor, device: torch.device) -> Tensor:
    """`host` in memory from which `device` can copy while the host goes on."""
    return host.contiguous().pin_memory() if device.type == "cuda" else host


class BatchBuilder:
    """State of `max_num_seqs` slots and the batches made from it."""

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        """`max_model_len` bounds a sequence's length, and with it the width of the page table."""
        max_pages = -(-max_model_len // page_size)
        self._page_size = page_size
        self._device = device
        self._token_ids: dict[int, Tensor] = {}  # slot -> [n] int64 on the host
        self._num_given = [0] * max_num_seqs
        self._num_pages = [0] * max_num_seqs
        self._page_table = torch.zeros((max_num_seqs, max_pages), dtype=torch.int32, device=device)
        self._last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._sampled = torch.tensor([SAMPLED])

    def admit(self, sequence: NewSequence) -> None:
        """Take the slot; its page table starts empty."""
        # Through NumPy, which takes a list of a million numbers several times as fast as torch.
        self._token_ids[sequence.slot] = torch.from_numpy(np.array(sequence.token_ids, dtype=np.int64))
        self._num_given[sequence.slot] = len(sequence.token_ids)
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
            if not chunk.new_page_ids:  # nearly all decodes
                continue
            num_valid = -(-chunk.start // self._page_size)
            for column, page_id in enumerate(chunk.new_page_ids, start=self._num_pages[chunk.slot]):
                slots.append(chunk.slot)
                columns.append(column)
                page_ids.append(page_id)
                if column >= num_valid:
                    fresh.append(page_id)
            self._num_pages[chunk.slot] += len(chunk.new_page_ids)
        if page_ids:
            entries = self.to_device(torch.tensor([slots, columns, page_ids]))
            self._page_table[entries[0], entries[1]] = entries[2].to(torch.int32)
        return fresh

    def build(self, chunks: Sequence[Chunk]) -> ModelInput:
        """The input of a step over `chunks` (at least one, single-token chunks first)."""
        max_seq_len = max(chunk.start + chunk.num_tokens for chunk in chunks)
        if chunks[-1].num_tokens == 1:
            return self.decode_input(self.to_device(self.pack_decodes(chunks)), max_seq_len)
        num_chunks, num_tokens = len(chunks), sum(chunk.num_tokens for chunk in chunks)
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        host = torch.tensor([[chunk.slot, chunk.start, chunk.num_tokens] for chunk in chunks]).T
        query_start = torch.nn.functional.pad(host[2].cumsum(0), (1, 0))
        packed = torch.cat([host.flatten(), query_start, *map(self._known_token_ids, chunks)])
        sizes = [num_chunks] * 3 + [num_chunks + 1, num_tokens]
        slots, starts, counts, query_start, token_ids = torch.split(self.to_device(packed), sizes)
        head = token_ids[:num_decodes]
        torch.where(head == SAMPLED, self._last_token[slots[:num_decodes]], head, out=head)
        sequence_of_token = torch.arange(num_chunks, device=self._device).repeat_interleave(counts, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=self._device) + (starts - query_start[:-1])[sequence_of_token]
        page_table = self._page_table[slots, : -(-max_seq_len // self._page_size)]
        pages = page_table[sequence_of_token, positions // self._page_size].to(torch.int64)
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=pages * self._page_size + positions % self._page_size,
            query_start=query_start.to(torch.int32),
            seq_lens=(starts + counts).to(torch.int32),
            page_table=page_table,
            sequence_of_token=sequence_of_token.to(torch.int32),
            num_decodes=num_decodes,
            max_query_len=max(chunk.num_tokens for chunk in chunks),
            max_seq_len=max_seq_len,
            page_size=self._page_size,
        )
        return ModelInput(token_ids, batch, slots)

    def pack_decodes(self, chunks: Sequence[Chunk], num_rows: int | None = None) -> Tensor:
        """What `decode_input` needs of single-token chunks: [4, num_rows] int64 on the host.

        The rows are slots, positions, token ids and whether the token is written to the cache. Rows beyond the chunks repeat
        the shortest sequence, which costs the least, and write nothing.
        """
        slots = [chunk.slot for chunk in chunks]
        positions = [chunk.start for chunk in chunks]
        token_ids = [self._token_id(chunk) for chunk in chunks]
        num_idle = 0 if num_rows is None else num_rows - len(slots)
        if num_idle:
            shortest = positions.index(min(positions))
            for column in (slots, positions, token_ids):
                column += [column[shortest]] * num_idle
        is_written = [1] * len(chunks) + [0] * num_idle
        return torch.tensor([slots, positions, token_ids, is_written])

    def decode_input(self, packed: Tensor, max_seq_len: int) -> ModelInput:
        """The input of a step over single-token chunks; only the device is busy, so a graph can capture it.

        Args:
            packed: [4, B] int64 from `pack_decodes`, on the device.
            max_seq_len: bound of the sequences' lengths.
        """
        slots, positions, given, is_written = packed.unbind(0)
        num_rows = slots.shape[0]
        page_table = self._page_table[slots, : -(-max_seq_len // self._page_size)]
        pages = page_table.gather(1, (positions // self._page_size)[:, None]).squeeze(1).to(torch.int64)
        rows = torch.arange(num_rows + 1, dtype=torch.int32, device=self._device)
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=torch.where(is_written == 1, pages * self._page_size + positions % self._page_size, -1),
            query_start=rows,
            seq_lens=(positions + 1).to(torch.int32),
            page_table=page_table,
            sequence_of_token=rows[:num_rows],
            num_decodes=num_rows,
            max_query_len=1,
            max_seq_len=max_seq_len,
            page_size=self._page_size,
        )
        return ModelInput(torch.where(given == SAMPLED, self._last_token[slots], given), batch, slots)

    def set_last_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """Remember the tokens just sampled: both [S] int64 on the device."""
        self._last_token.index_copy_(0, slots, token_ids)

    def to_device(self, host: Tensor) -> Tensor:
        """A copy on the device, which it fetches in its own time."""
        return host_buffer(host, self._device).to(self._device, non_blocking=True)

    def _known_token_ids(self, chunk: Chunk) -> Tensor:
        """[chunk.num_tokens] int64: the tokens that the sequence came with, or `SAMPLED`."""
        if chunk.start >= self._num_given[chunk.slot]:
            return self._sampled
        return self._token_ids[chunk.slot][chunk.start : chunk.start + chunk.num_tokens]

    def _token_id(self, chunk: Chunk) -> int:
        is_given = chunk.start < self._num_given[chunk.slot]
        return int(self._token_ids[chunk.slot][chunk.start]) if is_given else SAMPLED
