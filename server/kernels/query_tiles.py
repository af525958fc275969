"""Query tiles of a ragged prefill batch: which sequence and which positions a tile index means.

A tile is `TILE` consecutive absolute positions of one sequence, aligned to multiples of `TILE`, so a tile never crosses a page
(`TILE` divides the page size) and all its queries share one own block. The number of tiles depends on device values; the grid
uses the host-side bound `num_query_tiles`, and programs past the last tile find themselves outside every sequence.

Sizes that change from step to step are never compiled into a kernel (`do_not_specialize`), and widths that must be constants
come in few steps: a server must not stop to compile because a batch has a new shape.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from server.kernels.attention_batch import AttentionBatch
from server.kernels.device import is_hopper
from server.kernels.direct_launch import direct_launch

_MAX_ROWS = 256


def num_query_tiles(batch: AttentionBatch, tile: int) -> int:
    """Upper bound of the tiles of a batch, from host integers only: an unaligned chunk touches one tile more."""
    num_seqs = batch.seq_lens.shape[0]
    num_tokens = batch.positions.shape[0]
    return min(num_tokens, num_tokens // tile + 2 * num_seqs)


def query_tile(num_heads: int, page_size: int) -> int:
    """Queries per tile when all `num_heads` heads of a query are rows of it: at most 256 rows and a page of queries."""
    return max(1, min(page_size, _MAX_ROWS // num_heads))


def padded_num_seqs(batch: AttentionBatch) -> int:
    """Width of `locate_query_tile`'s scan, a compile-time constant: 16, 64, 256, ... sequences."""
    width = 16
    while width < batch.seq_lens.shape[0]:
        width *= 4
    return width


@triton.jit
def locate_query_tile(query_start_ptr, seq_lens_ptr, num_seqs, i_tile, TILE: tl.constexpr, BLOCK_B: tl.constexpr):
    """Find tile `i_tile`: (sequence, first position, positions [begin, end) of its chunk, token index of position 0).

    A tile past the last one gets sequence 0 and the empty range begin = end = 0.
    """
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b < num_seqs
    b_first = tl.load(query_start_ptr + o_b, mask=m_b, other=0)
    b_query_len = tl.load(query_start_ptr + o_b + 1, mask=m_b, other=0) - b_first
    b_end = tl.load(seq_lens_ptr + o_b, mask=m_b, other=0)
    b_begin = b_end - b_query_len
    b_tiles = tl.where(b_query_len > 0, (b_end + TILE - 1) // TILE - b_begin // TILE, 0)
    b_tiles_end = tl.cumsum(b_tiles, 0)
    m_own = (i_tile < b_tiles_end) & (i_tile >= b_tiles_end - b_tiles)  # true for exactly one sequence, or for none
    i_seq = tl.sum(tl.where(m_own, o_b, 0), 0)
    begin = tl.sum(tl.where(m_own, b_begin, 0), 0)
    end = tl.sum(tl.where(m_own, b_end, 0), 0)
    tile_of_seq = tl.sum(tl.where(m_own, i_tile - (b_tiles_end - b_tiles), 0), 0)
    token_shift = tl.sum(tl.where(m_own, b_first - b_begin, 0), 0)
    first = (begin // TILE + tile_of_seq) * TILE
    return i_seq, first, begin, end, token_shift


@triton.jit
def store_tile_record(record_ptr, first, begin, end, token_shift, own_page, num_listed, num_left, i_seq):
    """Write the eight int32 of a tile's work record; `end` is 0 in the record of a tile that does not exist."""
    tl.store(record_ptr, first)
    tl.store(record_ptr + 1, begin)
    tl.store(record_ptr + 2, end)
    tl.store(record_ptr + 3, token_shift)
    tl.store(record_ptr + 4, own_page)
    tl.store(record_ptr + 5, num_listed)
    tl.store(record_ptr + 6, num_left)
    tl.store(record_ptr + 7, i_seq)


@direct_launch
@triton.jit(
    do_not_specialize=["num_seqs", "stride_pb"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "page_table_ptr"],
)
def _record_kernel(
    query_start_ptr,
    seq_lens_ptr,
    page_table_ptr,
    records_ptr,
    num_seqs,
    stride_pb,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_seq, first, begin, end, token_shift = locate_query_tile(query_start_ptr, seq_lens_ptr, num_seqs, i_tile, TILE, BLOCK_B)
    own = first // PAGE
    own_page = tl.load(page_table_ptr + i_seq.to(tl.int64) * stride_pb + own)
    store_tile_record(records_ptr + i_tile * 8, first, begin, end, token_shift, own_page, own, 0, i_seq)


def tile_records(batch: AttentionBatch, tile: int) -> torch.Tensor:
    """Work records [num_query_tiles, 8] int32 of tiles that attend to all pages before their own: see `store_tile_record`.

    They are made for the first layer that asks, and kept with the batch: one whose tensors change is another batch.
    """
    if tile not in batch.tile_records:
        num_tiles = num_query_tiles(batch, tile)
        records = torch.empty((num_tiles, 8), dtype=torch.int32, device=batch.seq_lens.device)
        _record_kernel[(num_tiles,)](
            batch.query_start,
            batch.seq_lens,
            batch.page_table,
            records,
            batch.seq_lens.shape[0],
            batch.page_table.stride(0),
            PAGE=batch.page_size,
            TILE=tile,
            BLOCK_B=padded_num_seqs(batch),
            num_warps=1,
        )
        batch.tile_records[tile] = records
    return batch.tile_records[tile]


def uses_hopper_kernels(tensor: torch.Tensor) -> bool:
    """Whether the warp-specialised kernels can run: CUDA, compute capability 9.0, 16-bit floats."""
    return tensor.dtype in (torch.bfloat16, torch.float16) and is_hopper(tensor.device)
