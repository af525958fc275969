"""What a GPU says to the division of its memory, on two layers of the released widths with the vision tower.

The estimates decide whether a start is tried at all, so they must come near what is measured; and what shall stay free must be
free when the cache is allocated and the largest steps run.
"""

import gc

import pytest
import torch

from benchmarks.slices import Layers, random_weights, read_values, slice_values
from server.engine_memory import CudaMemory, measure, run_largest_steps
from server.engine_setup import assemble, plan_memory
from server.model.config import RELEASED_DIR
from server.model.m3 import M3Model
from server.model.ranks import OneRank
from server.model.shard import Alone, Shard
from server.model.weights import parameters
from server.settings import load_settings
from server.sizing import GIB, StepLimits, require_room

pytestmark = pytest.mark.gpu

LAYERS = Layers(num_dense=1, num_sparse=1)
# The allocator rounds to blocks of 2 MiB and loses room between tensors of different steps.
MAX_WORKSPACE_RATIO, SPARE_BYTES = 1.5, GIB


def no_pixels(ref):
    raise AssertionError("no request has media")


def live_through_a_start(device, dtype, config, settings, limits, memory):
    """Plan, load, measure, allocate, run the largest steps; returns what was planned, and what is free then."""
    planned = plan_memory(settings, config, device, dtype, limits, memory)
    require_room(planned, 128, is_quantised=config.quantization is not None)
    model = M3Model(config, random_weights(parameters(config, Shard()), device, dtype), Alone())
    measured = measure(planned, memory, model, limits)
    parts = assemble(settings, model, measured, memory, limits, no_pixels, OneRank())
    longest = StepLimits(limits.max_num_seqs, limits.max_num_batched_tokens, parts.ready.max_model_len)
    run_largest_steps(model, measured.spec, longest)
    return planned, measured, torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.free_bytes()


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "mxfp8"])
def test_estimates_hold_and_what_shall_stay_free_stays_free(quantized, tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    config = read_values(slice_values(RELEASED_DIR / "config.json", LAYERS, quantized=quantized))
    settings = load_settings({"model": tmp_path, "device": "cuda", "max_num_seqs": 64}, environ={})
    limits = StepLimits(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=config.text.max_position_embeddings)
    planned, measured, free_bytes = live_through_a_start(device, torch.bfloat16, config, settings, limits, CudaMemory(device))
    gc.collect()
    torch.cuda.empty_cache()
    print(f"weights {planned.use.weights / GIB:.2f} estimated, {measured.use.weights / GIB:.2f} GiB measured")
    print(f"workspaces {planned.use.workspaces / GIB:.2f} estimated, {measured.use.workspaces / GIB:.2f} GiB measured")
    print(
        f"others {measured.taken_bytes / GIB:.2f} GiB; cache {measured.cache_bytes / GIB:.2f} GiB of {measured.num_pages} pages"
    )
    print(f"free behind the largest steps {free_bytes / GIB:.2f} GiB, kept {measured.kept_bytes / GIB:.2f} GiB")
    assert measured.use.weights == pytest.approx(planned.use.weights, rel=0.02, abs=SPARE_BYTES / 4)
    assert measured.use.workspaces <= planned.use.workspaces * MAX_WORKSPACE_RATIO + SPARE_BYTES
    assert planned.use.workspaces <= measured.use.workspaces * MAX_WORKSPACE_RATIO + SPARE_BYTES
    assert measured.cache_bytes > 50 * GIB
    assert free_bytes >= measured.kept_bytes - SPARE_BYTES // 4
