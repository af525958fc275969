"""The division of a GPU's memory: released totals, monotone in what it is given, and a refusal that says by how much."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.kvcache.lanes import Lane
from server.kvcache.pools import CachePools, CacheSpec
from server.model.config import RELEASED_DIR, M3Config, cache_spec
from server.model.quantization import Quantization
from server.model.shard import Shard
from server.model.weights import parameters
from server.sizing import GIB, MemoryPlan, MemoryUse, NoRoomError, StepLimits, require_room, size, table, weights_bytes
from server.workspaces import graphs_bytes, workspace_bytes

BF16 = torch.bfloat16
SPEC = CacheSpec((False, True, True), num_kv_heads=2, head_dim=64, index_dim=64, page_size=128, dtype=BF16)
LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=1 << 20)
SIZES = st.integers(0, 4 * GIB)


@pytest.fixture(scope="module")
def released():
    return M3Config.from_file(RELEASED_DIR)


def plan(total=10 * GIB, kept=GIB, taken=GIB, max_pages=None, limit=None, **use):
    return MemoryPlan(total, kept, taken, MemoryUse(**use), SPEC, max_pages, limit)


def test_the_released_model_takes_795_51_gib(released):
    assert weights_bytes(parameters(released, Shard()), BF16) == 854_172_958_720
    assert size(854_172_958_720) == "795.51 GiB"


def test_the_mxfp8_release_takes_413_27_gib(released):
    quantised = replace(released, quantization=Quantization(ignored_layers=()))
    assert weights_bytes(parameters(quantised, Shard()), BF16) == 443_742_085_120
    assert size(443_742_085_120) == "413.27 GiB"


@pytest.mark.parametrize(("world", "page_bytes"), [(1, 137_472), (2, 76_032), (4, 45_312), (8, 45_312), (16, 45_312)])
def test_a_token_of_the_released_model_takes_what_its_heads_take(released, world, page_bytes):
    assert cache_spec(released, BF16, Shard(0, world)).bytes_per_page == 128 * page_bytes


@pytest.mark.parametrize(("tokens", "gib"), [(131_072, 16.78), (524_288, 67.13), (1_048_576, 134.25)])
def test_a_sequence_of_the_released_model_takes_its_known_size(released, tokens, gib):
    spec = cache_spec(released, BF16)
    assert spec.num_pages(tokens) * spec.bytes_per_page / GIB == pytest.approx(gib, abs=0.0051)


def test_ranks_hold_every_weight_at_least_once(released):
    whole = weights_bytes(parameters(released, Shard()), BF16)
    for world in (2, 4, 8, 16):
        shares = {weights_bytes(parameters(released, Shard(rank, world)), BF16) for rank in (0, world - 1)}
        assert len(shares) == 1
        assert whole / world < shares.pop() < whole / world + 8 * GIB


def test_the_workspace_is_what_a_gpu_measured(released):
    """5.79 GiB in bf16 and 5.74 GiB in MXFP8 on one H200, 2026-11-30 (`tests/engine/test_engine_memory_gpu.py`)."""
    estimate = workspace_bytes(released, Shard(), 2, StepLimits(64, 8192, 1 << 20))
    assert estimate == pytest.approx(5.77 * GIB, rel=0.1)


def test_captured_steps_of_the_released_model_take_about_a_gibibyte(released):
    assert GIB // 2 < graphs_bytes(released, 2, LIMITS) < 2 * GIB


@given(st.integers(1, 16384), st.integers(1, 1 << 20))
def test_larger_steps_never_take_less(num_tokens, max_model_len):
    config = M3Config.from_file(RELEASED_DIR)
    limits = StepLimits(64, num_tokens, max_model_len)
    assert graphs_bytes(config, 2, limits) <= graphs_bytes(config, 2, replace(limits, max_num_seqs=65))
    assert graphs_bytes(config, 2, limits) <= graphs_bytes(config, 2, replace(limits, max_model_len=max_model_len + 9000))
    estimate = workspace_bytes(config, Shard(), 2, limits)
    assert estimate <= workspace_bytes(config, Shard(), 2, StepLimits(64, num_tokens + 100, max_model_len))
    assert estimate <= workspace_bytes(config, Shard(), 2, StepLimits(64, num_tokens, max_model_len + 1000))


def test_pages_fill_what_is_left_and_the_pools_take_what_was_planned():
    division = plan(total=GIB, kept=GIB // 4, taken=0, weights=GIB // 2, workspaces=GIB // 4 - 10 * SPEC.bytes_per_page - 1)
    assert (division.num_pages, division.num_tokens) == (10, 1280)
    pools = CachePools(SPEC, division.num_pages, torch.device("cpu"))
    assert division.cache_bytes == pools.dense.nbytes + pools.index.nbytes + pools.sparse.nbytes


@given(total=SIZES, more=SIZES, kept=SIZES, taken=SIZES, weights=SIZES, workspaces=SIZES)
def test_more_memory_never_gives_fewer_pages(total, more, kept, taken, weights, workspaces):
    others = {"kept": kept, "taken": taken, "weights": weights, "workspaces": workspaces}
    less, greater = plan(total=total, **others), plan(total=total + more, **others)
    assert 0 <= less.num_pages <= greater.num_pages
    assert less.missing_bytes(1000) >= greater.missing_bytes(1000)
    assert plan(total=total, **{**others, "weights": weights + more}).num_pages <= less.num_pages


@given(total=SIZES, weights=SIZES, tokens=st.integers(1, 1 << 20), limit=st.none() | SIZES)
def test_nothing_is_missing_exactly_when_the_sequence_fits(total, weights, tokens, limit):
    division = plan(total=total, kept=0, taken=0, weights=weights, limit=limit)
    fits = division.num_sequences(tokens) >= 1 and (limit is None or limit <= division.left_bytes)
    assert (division.missing_bytes(tokens) == 0) == fits
    missing = division.missing_bytes(tokens)
    if limit is None:
        assert plan(total=total + missing, kept=0, taken=0, weights=weights).num_sequences(tokens) >= 1


def test_no_more_pages_than_slots_can_fill_unless_asked_for():
    assert plan(max_pages=7).num_pages == 7
    assert plan(max_pages=7, limit=100 * SPEC.bytes_per_page).num_pages == 100


def test_lanes_on_the_host_leave_room_for_more_sequences():
    division = plan()
    pages = SPEC.num_pages(65_536)
    sparse = SPEC.lane_bytes[Lane.SPARSE]
    resident = pages * (SPEC.bytes_per_page - sparse) + 16 * sparse
    assert division.num_sequences_with_host(65_536, None, Lane.SPARSE, 16) == division.cache_bytes // resident
    assert division.num_sequences_with_host(65_536, 3 * pages * sparse, Lane.SPARSE, 16) == 3
    assert division.num_sequences_with_host(65_536, 3 * pages * sparse - 1, Lane.SPARSE, 16) == 2


@given(st.integers(1, 1 << 20), st.integers(0, 64))
def test_the_host_never_costs_sequences(tokens, num_hot_pages):
    division = plan()
    alone = division.num_sequences(tokens)
    assert division.num_sequences_with_host(tokens, None, Lane.SPARSE, num_hot_pages) >= alone
    assert division.num_sequences_with_host(tokens, None, Lane.SPARSE | Lane.INDEX, num_hot_pages) >= alone


def test_a_refusal_says_by_how_much_and_what_would_help():
    division = plan(weights=9 * GIB)
    with pytest.raises(NoRoomError) as raised:
        require_room(division, 128, is_quantised=False)
    text = str(raised.value)
    assert text.startswith("1.00 GiB of memory are missing. Needed: weights 9.00 GiB, a sequence of 128 tokens 229,376 bytes.")
    assert "There: 8.00 GiB of 10.00 GiB, as 1.00 GiB are kept free and 1.00 GiB are taken by others" in text
    assert text.endswith("more GPUs, or an MXFP8 checkpoint")
    with pytest.raises(NoRoomError, match=r"more GPUs$"):
        require_room(division, 128, is_quantised=True)


@given(st.integers(1 << 12, 1 << 22), st.integers(0, 9 * GIB))
def test_a_cure_cures(tokens, weights):
    division = plan(kept=2 * GIB, weights=weights)
    try:
        require_room(division, tokens, is_quantised=False)
    except NoRoomError as error:
        text = str(error)
    else:
        return
    if "gpu_memory_utilization" in text:
        share = float(text.split("gpu_memory_utilization ")[1].split()[0])
        require_room(plan(kept=int(10 * GIB * (1 - share)), weights=weights), tokens, is_quantised=False)
    if "max_model_len" in text:
        require_room(division, int(text.split("max_model_len ")[1].split()[0]), is_quantised=False)


@pytest.mark.parametrize(("limit", "cure"), [(SPEC.bytes_per_page, "or more"), (20 * GIB, "or less")])
def test_the_cure_of_a_cache_size(limit, cure):
    division = plan(limit=limit, weights=GIB)
    with pytest.raises(NoRoomError, match=cure) as raised:
        require_room(division, 1024, is_quantised=False)
    cured = int(str(raised.value).split("; cache_bytes is ")[1].split("cache_bytes ")[1].split()[0])
    require_room(plan(limit=cured, weights=GIB), 1024, is_quantised=False)


def test_the_table_adds_up():
    division = plan(weights=3 * GIB, workspaces=2 * GIB, graphs=GIB, features=GIB // 2)
    numbers = [float(line.split()[0]) for line in table(division)[:8]]
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.01)
    assert numbers[-1] == 1.5
