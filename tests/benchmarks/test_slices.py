import json

import pytest
import torch

from benchmarks.routing import distinct_experts
from benchmarks.slice_checkpoint import write_checkpoint
from benchmarks.slices import Layers, Slice, slice_values
from benchmarks.step_cases import decode_case, pools_of, prefill_case, random_pools
from server.api.chat_format import ChatFormat
from server.kernels.mxfp8 import GROUP_SIZE, Mxfp8Weight, dequantize_torch
from server.model.config import M3Config, cache_spec
from server.model.m3 import M3Model
from server.model.progress import NoProgress

CPU = torch.device("cpu")
TINY = "server/model/tiny/config.json"


@pytest.fixture
def tiny_config(request):
    return request.config.rootpath / TINY


@pytest.fixture(params=[False, True], ids=["plain", "mxfp8"])
def tiny_slice(request, tiny_config):
    return Slice(tiny_config, Layers(1, 2), CPU, torch.float32, quantized=request.param, max_positions=2048)


def forward(model, case, pools):
    return model.forward(case.token_ids, case.batch, pools)


def test_activations_of_a_slice_stay_in_range(tiny_slice):
    pools = random_pools(cache_spec(tiny_slice.config, torch.float32), 1 << 22, CPU)
    model = tiny_slice.model(tiny_slice.layers)
    hidden = forward(model, prefill_case(0, 200, pools, 100), pools)
    assert hidden.isfinite().all()
    assert 0.5 < hidden.std() < 2
    assert 1 < model.logits(hidden).std() < 9


def test_a_part_has_the_layers_of_the_slice(tiny_slice):
    pools = random_pools(cache_spec(tiny_slice.config, torch.float32), 1 << 22, CPU)
    case = prefill_case(0, 5, pools, 100)
    config, weights = tiny_slice.part(Layers(0, 1))
    assert (config.text.num_layers, config.text.layer_is_sparse) == (1, (True,))
    assert weights["layers.0.qkv"] is tiny_slice.weights["layers.1.qkv"]
    part = pools_of(pools, Layers(0, 1))
    assert part.index_lane(0).data_ptr() == pools.index_lane(1).data_ptr()
    assert not torch.equal(
        forward(tiny_slice.model(tiny_slice.layers), case, pools), forward(tiny_slice.model(Layers(0, 1)), case, part)
    )


def test_a_cache_of_other_layers_is_refused(tiny_slice):
    """Benchmarks once gave a sparse layer the lanes of a dense one, where it attended to the whole context."""
    pools = random_pools(cache_spec(tiny_slice.config, torch.float32), 1 << 22, CPU)
    with pytest.raises(AssertionError, match="the cache is that of other layers"):
        forward(tiny_slice.model(Layers(0, 1)), prefill_case(0, 5, pools, 100), pools)


def test_quantised_weights_have_the_spread_of_plain_ones(tiny_config):
    weights = Slice(tiny_config, Layers(0, 1), CPU, torch.float32, quantized=True, max_positions=64).weights
    w13 = dequantize_torch(Mxfp8Weight(weights["layers.0.w13"], weights["layers.0.w13.scales"]), torch.float32)
    assert weights["layers.0.w13.scales"].shape[-1] * GROUP_SIZE == w13.shape[-1]
    assert 0.7 < w13.std() * w13.shape[-1] ** 0.5 < 2


def test_decode_cases_share_pages_only_when_the_pool_is_too_small(tiny_slice):
    spec = cache_spec(tiny_slice.config, torch.float32)
    roomy, small = (random_pools(spec, num_pages * spec.bytes_per_page, CPU) for num_pages in (6, 4))
    case = decode_case(2, 300, roomy, 100, 512)
    assert case.batch.page_table[:, :3].unique().numel() == 6
    assert (case.batch.page_table.shape[1], case.batch.max_seq_len) == (4, 512)
    assert (case.page_uses, case.chunks[0].num_keys) == (1, 300)
    assert decode_case(2, 300, small, 100, 512).page_uses == 1.5


def test_the_experts_of_a_step_are_counted(tiny_slice):
    pools = random_pools(cache_spec(tiny_slice.config, torch.float32), 1 << 22, CPU)
    one = distinct_experts(tiny_slice, Layers(1, 2), decode_case(1, 20, pools, 100, 512), pools)
    many = distinct_experts(tiny_slice, Layers(1, 2), prefill_case(0, 200, pools, 100), pools)
    assert one == tiny_slice.config.text.num_experts_per_token
    assert one < many <= tiny_slice.config.text.num_experts


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "mxfp8"])
def test_a_written_slice_loads_as_a_checkpoint(tmp_path, tiny_config, quantized):
    values = slice_values(tiny_config, Layers(1, 1), quantized=quantized)
    write_checkpoint(tmp_path, values, CPU, torch.bfloat16)
    model = M3Model.load(tmp_path, M3Config.from_file(tmp_path), CPU, torch.bfloat16, progress=NoProgress())
    assert model.config.text.num_layers == 2
    assert (model.config.quantization is not None) == quantized
    ChatFormat.load(tmp_path)


def test_the_tokenizer_of_a_true_width_slice_knows_every_id(tmp_path, tiny_config):
    values = slice_values(tiny_config, Layers(1, 0))
    values |= {"image_token_index": 2025, "video_token_index": 2026}
    values["text_config"]["vocab_size"] = 2064
    write_checkpoint(tmp_path, values, CPU, torch.bfloat16)
    chat = ChatFormat.load(tmp_path)
    assert chat.media_ids == {2025, 2026}
    assert chat.vocab_size > 2050
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(2000))
