"""Query tiles of a ragged prefill batch: which sequence and which positions a tile index means.

A tile is `TILE` consecutive absolute positions of one sequence, aligned to multiples of `TILE`, so a tile never crosses a page
(`TILE` divides the page size) and all its queries share one own block. The number of tiles depends on device values; the grid
uses the host-side bound `num_query_tiles`, and programs past the last tile find themselves outside every sequence.
"""

import torch
import triton
import triton.language as tl

from server.kernels.attention_batch import AttentionBatch


def num_query_tiles(batch: AttentionBatch, tile: int) -> int:
    """Upper bound of the tiles of a batch, from host integers only: an unaligned chunk touches one tile more."""
    num_seqs = batch.seq_lens.shape[0]
    num_tokens = batch.positions.shape[0]
    return min(num_tokens, num_tokens // tile + 2 * num_seqs)


def padded_num_seqs(batch: AttentionBatch) -> int:
    """Number of sequences rounded up to a power of two: the compile-time width of `locate_query_tile`'s scan."""
    return int(triton.next_power_of_2(batch.seq_lens.shape[0]))


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


def uses_hopper_kernels(tensor: torch.Tensor) -> bool:
    """Whether the warp-specialised kernels can run: CUDA, compute capability 9.0, 16-bit floats."""
    if not tensor.is_cuda or tensor.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(tensor.device) == (9, 0)
