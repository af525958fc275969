"""Our decoder on a Hopper GPU, through the Triton kernels in bf16, against our twins in float32; weights in bf16 and in MXFP8.

The attention has the released geometry: 64 query heads, 4 KV and index heads of 128 dimensions, blocks of 128, 16 of them
attended. The reference is the float32 twins on the CPU, which `test_oracle_text` holds against transformers. bf16 rounds
scores, so near ties between blocks and between experts fall differently than in float32; the yardstick is therefore the error
of the twins themselves in bf16, for the same tokens. Errors are ‖ours - reference‖ / ‖reference‖ over all logits of a case.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from server.model.config import M3Config
from server.model.m3 import M3Model
from tests.model.quantised import quantise_checkpoint
from tests.oracle import PagedRunner, SilentProgress
from training.make_tiny import TINY_DIR
from training.tiny_weights import make_weights

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("all_cores")]

MAX_ERROR_TO_TWINS = 1.25  # the kernels' error is at most that multiple of the twins'
MAX_ERROR = 0.12
PROMPT_LEN = 2500
RELEASED_ATTENTION = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64}
RELEASED_INDEXER = {"sparse_num_index_heads": 4, "sparse_index_dim": 128}


class Side:
    """The checkpoint on one device in one dtype."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        config = M3Config.from_file(folder)
        self.model = M3Model.load(folder, config, torch.device(device), dtype, progress=SilentProgress())

    def runner(self, num_pages: int = 64) -> PagedRunner:
        return PagedRunner(self.model, num_pages)

    def logits(self, token_ids):
        (logits,) = self.runner().step([(0, token_ids)])
        return logits


@dataclass(frozen=True)
class Checkpoint:
    """What is served, and its numbers for the reference."""

    served: Path
    reference: Path


@pytest.fixture(scope="module", params=["bf16", "mxfp8"])
def checkpoint(request, tmp_path_factory):
    """The tiny checkpoint's size with the released attention; of MXFP8 the reference has the dequantised weights."""
    config = json.loads((TINY_DIR / "config.json").read_text())
    text = config["text_config"]
    text.update(RELEASED_ATTENTION)
    text["sparse_attention_config"].update(RELEASED_INDEXER)
    folder = tmp_path_factory.mktemp("released_attention")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(make_weights(config, range(text["vocab_size"])), folder / "model.safetensors")
    if request.param == "bf16":
        return Checkpoint(folder, folder)
    mxfp8 = Checkpoint(folder / "mxfp8", folder / "fp32")
    quantise_checkpoint(folder, mxfp8.served, mxfp8.reference)
    return mxfp8


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return Side(checkpoint.reference, "cpu", torch.float32)


@pytest.fixture(scope="module")
def kernels(checkpoint):
    return Side(checkpoint.served, "cuda", torch.bfloat16)


@pytest.fixture(scope="module")
def twins(checkpoint):
    return Side(checkpoint.served, "cpu", torch.bfloat16)


def prompt(length, seed=2):
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(logits, reference):
    return ((logits.cpu().float() - reference).norm() / reference.norm()).item()


def assert_close(ours, twins, reference):
    ours, twins = error(ours, reference), error(twins, reference)
    assert ours < MAX_ERROR
    assert ours < MAX_ERROR_TO_TWINS * twins


def test_one_prefill(oracle, kernels, twins):
    ids = prompt(PROMPT_LEN)
    assert_close(kernels.logits(ids), twins.logits(ids), oracle.logits(ids))


def test_chunked_prefill(oracle, kernels, twins):
    ids = prompt(PROMPT_LEN)
    runs = []
    for side in (kernels, twins):
        runner = side.runner()
        parts = [runner.step([(0, ids[i : i + 333])])[0] for i in range(0, PROMPT_LEN, 333)]
        runs.append(torch.cat(parts))
    assert_close(*runs, oracle.logits(ids))


def test_decoding_after_a_prefill(oracle, kernels, twins):
    ids = prompt(PROMPT_LEN + 32)
    runs = []
    for side in (kernels, twins):
        runner = side.runner()
        runner.step([(0, ids[:PROMPT_LEN])])
        runs.append(torch.cat([runner.step([(0, [token_id])])[0] for token_id in ids[PROMPT_LEN:]]))
    assert_close(*runs, oracle.logits(ids)[PROMPT_LEN:])


def test_mixed_steps_of_decodes_and_prefills(oracle, kernels, twins):
    ids = {0: prompt(2600, 1), 1: prompt(130, 2), 2: prompt(2300, 3), 3: prompt(17, 4), 4: prompt(1, 5)}
    computed = {0: 2599, 1: 129, 2: 100}
    runs = []
    for side in (kernels, twins):
        runner = side.runner(num_pages=96)
        runner.step([(i, ids[i][:count]) for i, count in computed.items()])
        runs.append(torch.cat(runner.step([(i, ids[i][computed.get(i, 0) :]) for i in (0, 1, 4, 2, 3)])))
    reference = [oracle.logits(ids[i])[computed.get(i, 0) :] for i in (0, 1, 4, 2, 3)]
    assert_close(*runs, torch.cat(reference))


def test_greedy_tokens_are_the_references(oracle, kernels):
    ids = prompt(PROMPT_LEN)
    reference = oracle.logits(ids)
    ours = kernels.logits(ids)
    best = reference.topk(2).values
    is_decisive = (best[:, 0] - best[:, 1]) > 0.1 * reference.std()
    agrees = ours.cpu().argmax(-1) == reference.argmax(-1)
    assert is_decisive.float().mean() > 0.5
    assert agrees[is_decisive].float().mean() > 0.98
