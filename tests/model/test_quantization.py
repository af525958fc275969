"""MXFP8 checkpoints: the same tokens as from what their numbers are in fp32, on one rank and on several; faults."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.kernels.mxfp8 import Mxfp8Weight, dequantize_torch
from server.model.checkpoint import CheckpointError
from server.model.config import M3Config
from server.model.loader import load_parameters
from server.model.m3 import M3Model
from server.model.progress import NoProgress
from server.model.quantization import Quantization, projection
from server.model.shard import Shard
from server.model.weights import parameters
from tests.model.quantised import quantise_checkpoint
from tests.oracle import save_checkpoint, tiny_config
from tests.paged_runner import PagedRunner

CPU = torch.device("cpu")
QUERY = "language_model.model.layers.1.self_attn.q_proj.weight"
PROJECTIONS = ("qkv", "out", "gate_up", "down", "w13", "w2")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Widths that two ranks can cut into groups of 32."""
    folder = tmp_path_factory.mktemp("source")
    widths = {"intermediate_size": 64, "dense_intermediate_size": 128, "shared_intermediate_size": 64}
    save_checkpoint(tiny_config(block_size=16, topk_blocks=4, **widths), folder, seed=2)
    return folder


@pytest.fixture
def written(source, tmp_path):
    """(MXFP8 checkpoint, its numbers as fp32)."""
    quantise_checkpoint(source, tmp_path / "mxfp8", tmp_path / "fp32")
    return tmp_path / "mxfp8", tmp_path / "fp32"


def load(folder, shard=None, dtype=torch.float32):
    wanted = parameters(M3Config.from_file(folder), shard or Shard())
    return load_parameters(folder, wanted, CPU, dtype, NoProgress())


def logits(folder):
    model = M3Model.load(folder, M3Config.from_file(folder), CPU, torch.float32, progress=NoProgress())
    ids = torch.randint(0, 250, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    return PagedRunner(model, 16).step([(0, ids)])[0]


def restored(weights, name):
    weight = projection(weights, name)
    return dequantize_torch(weight, torch.float32) if isinstance(weight, Mxfp8Weight) else weight


def change(folder, change_tensors):
    tensors = load_file(folder / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_the_model_is_that_of_the_dequantised_checkpoint(written):
    mxfp8, fp32 = written
    assert torch.equal(logits(mxfp8), logits(fp32))


def test_projections_stay_in_eight_bits_and_nothing_else_is_quantised(written):
    weights = load(written[0], dtype=torch.bfloat16)
    values = {name for name, tensor in weights.items() if tensor.dtype == torch.float8_e4m3fn}
    assert values == {name for name in weights if name.startswith("layers") and name.endswith(PROJECTIONS)}
    assert len(values) == 4 + 2 * 4
    assert {name for name, tensor in weights.items() if tensor.dtype == torch.uint8} == {f"{name}.scales" for name in values}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_what_it_would_hold_of_the_dequantised_checkpoint(written, rank):
    ours, reference = (load(folder, Shard(rank, 2)) for folder in written)
    for name, tensor in reference.items():
        assert torch.equal(restored(ours, name), tensor)


@pytest.mark.parametrize(
    ("ignored", "pattern"),
    [
        ("language_model.model.layers.1.self_attn", r"layers\.1\.self_attn"),
        ("model.layers.1.block_sparse_moe.experts.3", r"layers\.1\.block_sparse_moe\.experts\.3\."),
        ("model.layers.2.self_attn.index_k_proj", r"layers\.2\.self_attn\.index_k_proj"),
        ("language_model.model.layers.0.mlp.up_proj", r"layers\.0\.mlp\.up_proj"),
        ("language_model", "language_model"),
    ],
)
def test_ignored_layers_load_beside_quantised_ones(source, tmp_path, ignored, pattern):
    mxfp8, fp32 = tmp_path / "mxfp8", tmp_path / "fp32"
    quantise_checkpoint(source, mxfp8, fp32, pattern, [ignored])
    ours, reference = load(mxfp8), load(fp32)
    for name, tensor in reference.items():
        assert torch.equal(restored(ours, name), tensor)
    assert torch.equal(logits(mxfp8), logits(fp32))


def test_a_stack_of_both_formats_is_named_in_the_log(source, tmp_path, caplog):
    ignored = "model.layers.1.block_sparse_moe.experts.3.w2"
    quantise_checkpoint(source, tmp_path / "mxfp8", tmp_path / "fp32", r"layers\.1\..*experts\.3\.w2", [ignored])
    weights = load(tmp_path / "mxfp8", Shard(1, 2))
    assert weights["layers.1.w2"].dtype == torch.float32
    assert weights["layers.1.w13"].dtype == torch.float8_e4m3fn
    assert [record.getMessage() for record in caplog.records] == [
        "layers.1.w2 is loaded unquantised, because some of its parts are"
    ]


@pytest.mark.parametrize(
    ("ignored", "is_covered"),
    [
        ("language_model.model.layers.1.self_attn.q_proj", False),
        ("model.layers.1.self_attn.q_proj", False),
        ("model.layers.1.self_attn", False),
        ("language_model", False),
        ("model", False),
        ("model.layers.1.self_attn.q", True),
        ("model.layers.11", True),
        ("self_attn.q_proj", True),
        ("model.layers.1.self_attn.index_q_proj", True),
    ],
)
def test_spellings_of_ignored_layers(ignored, is_covered):
    assert Quantization((ignored,)).covers(QUERY) is is_covered


def test_bytes_are_counted_as_they_are_stored(written):
    class Counter(NoProgress):
        total = read = 0

        def start(self, total_bytes):
            self.total = total_bytes

        def advance(self, num_bytes):
            self.read += num_bytes

    counter = Counter()
    load_parameters(written[0], parameters(M3Config.from_file(written[0]), Shard()), CPU, torch.float32, counter)
    stored = sum(tensor.nbytes for tensor in load_file(written[0] / "model.safetensors").values())
    assert counter.read == counter.total == stored


def test_a_nan_value_is_a_nan_weight(written):
    change(written[0], lambda tensors: tensors[QUERY].view(torch.uint8)[3, 40].fill_(0x7F))
    row = restored(load(written[0]), "layers.1.qkv")[3]
    assert row.isnan().nonzero().flatten().tolist() == list(range(32, 64))


def test_the_largest_scale_is_taken_and_a_larger_one_refused_by_name(written):
    scales = f"{QUERY}_scale_inv"

    def set_scales(scale):
        def change_tensors(tensors):
            tensors[scales][3, :] = torch.tensor([scale, 255], dtype=torch.uint8)

        change(written[0], change_tensors)

    set_scales(134)
    row = restored(load(written[0]), "layers.1.qkv")[3]
    assert row[:32].isfinite().all()
    assert row[32:].isnan().all()
    set_scales(135)
    with pytest.raises(CheckpointError, match=rf"MXFP8 scales above 2\^7: {scales} \(2\^8\)"):
        load(written[0])


def test_a_quantised_checkpoint_needs_a_config_that_says_so(written):
    config = json.loads((written[0] / "config.json").read_text())
    del config["quantization_config"]
    (written[0] / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"FP8 tensors that config.json does not call quantised: language_model.+"
    ) as raised:
        load(written[0])
    assert "unexpected tensors: language_model" in str(raised.value)


def test_a_config_that_says_quantised_needs_such_a_checkpoint(written):
    (written[1] / "config.json").write_bytes((written[0] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"tensors that config.json calls MXFP8: language_model.+ F32") as raised:
        load(written[1])
    assert "missing tensors: language_model" in str(raised.value)
    assert "weight_scale_inv" in str(raised.value)


def test_faulty_scales_are_reported_together(written):
    def damage(tensors):
        del tensors[f"{QUERY}_scale_inv"]
        key, value = (QUERY.replace("q_proj", f"{x}_proj") + "_scale_inv" for x in "kv")
        tensors[key] = tensors[key][:, :1].contiguous()
        tensors[value] = tensors[value].float()

    change(written[0], damage)
    with pytest.raises(CheckpointError) as raised:
        load(written[0])
    attention = "language_model.model.layers.1.self_attn"
    assert f"1 missing tensors: {QUERY}_scale_inv" in str(raised.value)
    assert f"wrong shape: {attention}.k_proj.weight_scale_inv [32, 1] instead of [32, 2]" in str(raised.value)
    assert f"unsupported type: {attention}.v_proj.weight_scale_inv F32" in str(raised.value)


def test_a_cut_through_a_group_is_refused_by_name(written):
    with pytest.raises(ValueError, match=r"layers.0.self_attn.o_proj.weight: columns 0 to 16 of 64 cut through groups of 32"):
        parameters(M3Config.from_file(written[0]), Shard(0, 4))
