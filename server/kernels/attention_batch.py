"""The shape of a ragged, paged attention batch, shared by all attention ops.

A batch holds B sequences. Sequence b contributes the query tokens `query_start[b] : query_start[b + 1]` of the flat token
axis T; they are its last positions, so query token i of b sits at absolute position
`seq_lens[b] - query_len[b] + (i - query_start[b])`. Keys of position p live in page `page_table[b, p // page_size]` at offset
`p % page_size`. Pages are anchored to absolute positions; a chunk may start inside a page.

Lanes, per layer (a layer's view; strides are free, the last two dimensions of a tile are contiguous):
    kv lane     [num_pages, num_kv_heads, 2, page_size, head_dim]   K tile, then V tile, of one page and head
    index lane  [num_pages, page_size, index_dim]                   index keys after norm and RoPE
"""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Metadata of one step, on the device of the tensors it indexes. Sequences with one query token come first.

    Attributes:
        positions: [T] int64, absolute position of every query token.
        slot_mapping: [T] int64, page id * page_size + offset where the token's keys are written; negative: nowhere.
        query_start: [B + 1] int32, prefix sums of query lengths.
        seq_lens: [B] int32, tokens of each sequence after this step.
        page_table: [B, max_pages] int32, page ids; entries past a sequence's last page are undefined but valid ids.
        sequence_of_token: [T] int32, index b of every query token.
        num_decodes: sequences 0..num_decodes-1 have exactly one query token; the rest may have any number >= 1.
        max_query_len: bound of query lengths, host integer.
        max_seq_len: bound of `seq_lens`, host integer; decides grid sizes, so a captured graph keeps it fixed.
        page_size: tokens per page = tokens per sparse block.
    """

    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    page_table: Tensor
    sequence_of_token: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    page_size: int

    @cached_property
    def decodes(self) -> "AttentionBatch | None":
        """The leading single-token sequences as a batch of their own (views, no copy), or None when there are none."""
        if self.num_decodes == 0:
            return None
        if self.num_decodes == self.seq_lens.shape[0]:
            return self
        n = self.num_decodes
        return replace(
            self,
            positions=self.positions[:n],
            slot_mapping=self.slot_mapping[:n],
            query_start=self.query_start[: n + 1],
            seq_lens=self.seq_lens[:n],
            page_table=self.page_table[:n],
            sequence_of_token=self.sequence_of_token[:n],
            max_query_len=1,
        )

    @cached_property
    def prefills(self) -> "AttentionBatch | None":
        """The sequences behind the decodes as a batch of their own, or None when there are none."""
        n = self.num_decodes
        if n == self.seq_lens.shape[0]:
            return None
        if n == 0:
            return self
        return replace(
            self,
            positions=self.positions[n:],
            slot_mapping=self.slot_mapping[n:],
            query_start=self.query_start[n:] - n,
            seq_lens=self.seq_lens[n:],
            page_table=self.page_table[n:],
            sequence_of_token=self.sequence_of_token[n:] - n,
            num_decodes=0,
        )

    @cached_property
    def tile_records(self) -> dict[int, Tensor]:
        """Work records of query tiles by tile size, see `query_tiles.tile_records`: all layers of a step share them."""
        return {}
