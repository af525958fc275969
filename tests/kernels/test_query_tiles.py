import torch

from server.kernels.query_tiles import num_query_tiles, tile_records
from tests.paged import paged_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 4


def expected_records(query_lens, seq_lens, batch):
    """(First position, chunk's begin and end, token of position 0, own page, pages before it, 0, sequence) of each tile."""
    records, token = [], 0
    for b, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        begin = seq_len - query_len
        for first in range(begin // TILE * TILE, seq_len, TILE):
            own = first // batch.page_size
            page = int(batch.page_table[b, own])
            records.append([first, begin, seq_len, token - begin, page, own, 0, b])
        token += query_len
    return records


def test_each_tile_of_each_chunk_has_a_record():
    query_lens, seq_lens = [3, 9, 17], [3, 40, 23]
    batch = paged_case(query_lens, seq_lens, 16, device=DEVICE).batch
    records, expected = tile_records(batch, TILE).tolist(), expected_records(query_lens, seq_lens, batch)
    assert records[: len(expected)] == expected
    assert len(records) == num_query_tiles(batch, TILE)
    assert all(record[2] == 0 for record in records[len(expected) :])


def test_layers_share_the_records_of_their_batch():
    batch = paged_case([1, 9], [5, 40], 16, device=DEVICE).batch
    assert tile_records(batch.prefills, TILE) is tile_records(batch.prefills, TILE)
    assert tile_records(batch.prefills, 2 * TILE) is not tile_records(batch.prefills, TILE)
    assert tile_records(batch, TILE) is not tile_records(batch.prefills, TILE)
