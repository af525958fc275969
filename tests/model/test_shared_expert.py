"""The shared expert: last of the routed experts' stack where it fits in, an MLP of its own elsewhere."""

import pytest
import torch
from safetensors.torch import load_file

from server.model.config import M3Config
from server.model.loader import load_parameters
from server.model.progress import NoProgress
from server.model.shard import Shard
from server.model.weights import parameters
from tests.model.quantised import quantise_checkpoint
from tests.oracle import SEED, Oracle, save_checkpoint, tiny_config

SHARED = "language_model.model.layers.1.block_sparse_moe.shared_experts"


def load(folder, shard=None):
    wanted = parameters(M3Config.from_file(folder), shard or Shard())
    return load_parameters(folder, wanted, torch.device("cpu"), torch.float32, NoProgress())


def test_one_of_the_same_width_is_the_last_of_the_stack(small_blocks):
    released = load_file(small_blocks.folder / "model.safetensors")
    gate, up, down = (released[f"{SHARED}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    for rank in range(2):
        weights = load(small_blocks.folder, Shard(rank, 2))
        assert not any(".shared." in name for name in weights)
        assert len(weights["layers.1.w13"]) == len(weights["layers.1.w2"]) == small_blocks.config.text.num_experts + 1
        own = slice(16 * rank, 16 * rank + 16)
        assert torch.equal(weights["layers.1.w13"][-1], torch.cat((gate[own], up[own])))
        assert torch.equal(weights["layers.1.w2"][-1], down[:, own])


def test_one_of_another_width_stays_alone_and_counts(tmp_path):
    oracle = Oracle.create(tiny_config(block_size=16, topk_blocks=4, shared_intermediate_size=48), tmp_path, seed=SEED)
    assert load(tmp_path)["layers.1.shared.gate_up"].shape == (96, 64)
    ids = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    (logits,) = oracle.runner().step([(0, ids)])
    assert (logits - oracle.reference_logits(ids)).abs().max().item() < 1e-3


@pytest.mark.parametrize("name", ["shared_experts", "shared_experts.down_proj"])
def test_one_of_another_format_stays_alone_so_that_the_experts_stay_quantised(tmp_path, name):
    save_checkpoint(tiny_config(block_size=16, topk_blocks=4), tmp_path / "source", seed=SEED)
    ignored = f"model.layers.1.block_sparse_moe.{name}"
    quantise_checkpoint(tmp_path / "source", tmp_path / "mxfp8", tmp_path / "fp32", rf"layers\.1\..*{name}", [ignored])
    weights = load(tmp_path / "mxfp8")
    assert weights["layers.1.w13"].dtype == weights["layers.1.w2"].dtype == torch.float8_e4m3fn
    assert weights["layers.1.shared.down"].dtype == torch.float32
    assert "layers.2.shared.down" not in weights
