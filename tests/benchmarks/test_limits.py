import pytest
import torch

from benchmarks.limits import Chunk, LayerLimits, expected_experts
from benchmarks.slices import RELEASED_CONFIG, Layers, read_values, slice_values
from benchmarks.timing import limit_us
from server.model.shard import Shard
from server.model.weights import parameters


def limits(quantized=False, world=1):
    config = read_values(slice_values(RELEASED_CONFIG, Layers(1, 5), quantized=quantized))
    shard = Shard(0, world)
    return LayerLimits(config.text, shard, parameters(config, shard), torch.bfloat16.itemsize)


def test_a_token_takes_its_own_experts_and_many_take_all():
    assert expected_experts(128, 4, 1) == pytest.approx(4)
    assert expected_experts(128, 4, 2) == pytest.approx(4 + 4 * 124 / 128)
    assert expected_experts(128, 4, 8192) == pytest.approx(128)


def test_chunks_count_the_keys_that_queries_see():
    chunk = Chunk(start=300, num_tokens=5)
    assert chunk.num_keys == 305
    assert chunk.num_visible == sum(p + 1 for p in range(300, 305))


@pytest.mark.parametrize("chunk", [Chunk(0, 40), Chunk(10, 30), Chunk(37, 1), Chunk(200, 17)])
def test_chunks_count_the_keys_of_selected_blocks(chunk):
    topk, block = 3, 8

    def attended(position):
        own = position % block + 1
        return sum(min(block, position + 1 - begin) for begin in range(0, position + 1, block)[-topk:]), own

    expected = sum(attended(position)[0] for position in range(chunk.start, chunk.num_keys))
    assert chunk.num_attended(topk * block, block) == expected


def test_a_decode_step_of_a_sparse_layer_reads_what_the_released_shapes_say():
    hidden, context = 6144, 8192
    attention = 2 * hidden * (2 * 64 * 128 + 2 * 4 * 128 + 4 * 128 + 128)
    experts = 2 * 3 * hidden * 3072 * (4 + 1)
    router = 4 * (128 * hidden + 128)
    norms = 2 * (2 * hidden + 4 * 128)
    cache = 256 * context + 2048 * (16 * 128)
    work = limits().layer(1, [Chunk(context - 1, 1)])
    assert work.num_bytes == pytest.approx(attention + experts + router + norms + cache)
    assert work.limit_us == pytest.approx(limit_us(work.num_bytes, 0))


def test_a_decode_step_of_a_dense_layer_reads_the_whole_context():
    short, long = (limits().layer(0, [Chunk(context - 1, 1)]).num_bytes for context in (1024, 9216))
    assert long - short == 8192 * 2048


def test_the_floor_of_a_prefill_chunk_is_the_published_one():
    layers = limits()
    assert layers.limit_us(range(6), [Chunk(0, 8192)]) / 1e3 == pytest.approx(53, abs=1.0)
    in_chunks = sum(layers.limit_us(range(6), [Chunk(start, 8192)]) for start in range(0, 131072, 8192))
    assert in_chunks / 1e3 == pytest.approx(1220, abs=30)


def test_quantised_weights_are_half_the_bytes_and_a_scale_for_32():
    plain, quantised = (limits(quantized).layer(1, [Chunk(0, 1)]) for quantized in (False, True))
    matrices = 6144 * (2 * 64 * 128 + 3 * 4 * 128 + 128) + 3 * 6144 * 3072 * 5
    assert plain.num_bytes - quantised.num_bytes == pytest.approx(matrices * (2 - 1 - 1 / 32))
    assert plain.flops == quantised.flops


def test_a_rank_reads_its_share():
    whole, part = (limits(world=world).layer(1, [Chunk(8191, 1)]).num_bytes for world in (1, 8))
    assert part < whole / 7
