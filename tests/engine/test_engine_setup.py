import shutil

import pytest
import torch

from server.engine_memory import capture_graphs, run_largest_steps
from server.engine_setup import (
    StartError,
    build,
    choose_device,
    choose_dtype,
    choose_model_len,
    choose_step_tokens,
    compile_prefills,
    plan_memory,
    require_cut,
)
from server.kvcache.pools import CachePools
from server.model.config import M3Config, cache_spec
from server.model.m3 import M3Model
from server.model.ranks import OneRank
from server.model.runner import ModelRunner
from server.model.shard import Shard
from server.settings import Device, Dtype, load_settings
from server.sizing import GIB, StepLimits
from server.workspaces import graphs_bytes

CPU = torch.device("cpu")


def settings(model="unused", **values):
    return load_settings({"model": model, **values}, environ={})


def no_pixels(ref):
    raise AssertionError("no request has media")


def cpu_plan(chosen, checkpoint, model_len):
    limits = StepLimits(chosen.max_num_seqs, 512, model_len)
    return plan_memory(chosen, M3Config.from_file(checkpoint), CPU, torch.float32, limits, None)


def test_the_cache_is_as_large_as_asked(checkpoint):
    page_bytes = cache_spec(M3Config.from_file(checkpoint), torch.float32).bytes_per_page
    assert cpu_plan(settings(cache_bytes=10 * page_bytes + 1, max_num_seqs=1), checkpoint, 16).num_pages == 10


def test_a_cache_without_a_size_is_one_gibibyte_but_no_more_than_can_be_used(checkpoint):
    page_bytes = cache_spec(M3Config.from_file(checkpoint), torch.float32).bytes_per_page
    assert cpu_plan(settings(max_num_seqs=3), checkpoint, 33).num_pages == 3 * 3
    assert cpu_plan(settings(max_num_seqs=3), checkpoint, 1 << 30).num_pages == GIB // page_bytes


def test_a_cache_without_room_for_a_page_is_refused_with_both_numbers(checkpoint):
    with pytest.raises(StartError, match=r"a sequence of 16 tokens \d.*cache_bytes is 1\b.*cache_bytes \d+ or more"):
        build(settings(checkpoint, cache_bytes=1, device="cpu"), no_pixels)


def test_a_length_that_was_asked_for_must_fit(checkpoint):
    with pytest.raises(StartError, match=r"a sequence of 5,000 tokens.*max_model_len \d+ or less"):
        build(settings(checkpoint, cache_bytes=200_000, max_model_len=5000, device="cpu"), no_pixels)


class FakeMemory:
    """A device of which the weights take `weights_bytes`; steps are run for real and said to take `step_bytes`."""

    def __init__(self, total_bytes, weights_bytes=30_000_000, step_bytes=7_000_000, taken_bytes=1_000_000):
        self.total_bytes = total_bytes
        self.num_reads = 0
        self.num_profiles = 0
        self._weights_bytes, self._step_bytes, self._taken_bytes = weights_bytes, step_bytes, taken_bytes

    def free_bytes(self):
        self.num_reads += 1
        return self.total_bytes - self._taken_bytes - (self._weights_bytes if self.num_reads > 1 else 0)

    def peak_bytes(self, work):
        work()
        self.num_profiles += 1
        return self._step_bytes


GPU_LIKE = {"device": "cpu", "media_feature_cache_bytes": 5_000_000, "max_num_seqs": 4, "max_num_batched_tokens": 32}


def test_what_the_steps_took_decides_the_cache(checkpoint, caplog):
    caplog.set_level("INFO")
    memory = FakeMemory(3 * GIB)
    parts = build(settings(checkpoint, gpu_memory_utilization=0.5, max_model_len=200, **GPU_LIKE), no_pixels, memory=memory)
    config = M3Config.from_file(checkpoint)
    graphs = graphs_bytes(config, 4, StepLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200))
    left_bytes = 3 * GIB - 3 * GIB // 2 - 1_000_000 - 30_000_000 - 7_000_000 - graphs - 5_000_000
    page_bytes = cache_spec(config, torch.float32).bytes_per_page
    assert memory.num_profiles == 1
    assert parts.ready.num_pages == left_bytes // page_bytes
    assert parts.ready.max_model_len == 200
    assert f"{left_bytes / GIB:.2f}  left for the cache" in caplog.text


class RankOfTwo(OneRank):
    """Rank 1 beside one that has room for 40 pages."""

    def __init__(self):
        super().__init__()
        self.shard = Shard(1, 2)
        self.numbers = []

    def share(self, token_ids):
        token_ids.zero_()

    def least(self, number):
        self.numbers.append(number)
        return min(number, 40 * 16 if len(self.numbers) == 1 else 40)


def test_ranks_have_as_many_pages_as_the_one_with_the_least_room(checkpoint):
    chosen = settings(checkpoint, max_model_len=200, tensor_parallel_size=2, **GPU_LIKE)
    ranks = RankOfTwo()
    parts = build(chosen, no_pixels, memory=FakeMemory(3 * GIB, step_bytes=GIB), ranks=ranks)
    assert parts.ready.num_pages == 40
    num_tokens_before, num_pages = ranks.numbers
    assert num_tokens_before > num_pages * 16 > 40 * 16
    assert parts.grammars is None


@pytest.mark.parametrize(("num_ranks", "fault"), [(2, None), (3, "num_attention_heads: 4"), (4, None), (8, "attention_heads")])
def test_a_model_that_cannot_be_cut_is_refused_by_name(checkpoint, num_ranks, fault):
    chosen = settings(checkpoint, tensor_parallel_size=num_ranks)
    if fault is None:
        require_cut(chosen)
    else:
        with pytest.raises(StartError, match=f"tensor_parallel_size is {num_ranks}: .*{fault}.* cannot be cut"):
            require_cut(chosen)


def test_without_prefixes_to_keep_the_cache_is_no_larger_than_the_slots_fill(checkpoint):
    chosen = settings(checkpoint, max_model_len=200, enable_prefix_caching=False, **GPU_LIKE)
    assert build(chosen, no_pixels, memory=FakeMemory(3 * GIB)).ready.num_pages == 4 * -(-200 // 16)


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(checkpoint, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("loaded")

    monkeypatch.setattr(M3Model, "load", refuse)
    memory = FakeMemory(2_000_000)
    with pytest.raises(StartError, match=r"of memory are missing.*weights.*workspaces.*more GPUs"):
        build(settings(checkpoint, **GPU_LIKE), no_pixels, memory=memory)
    assert memory.num_profiles == 0


def test_steps_that_take_more_than_estimated_end_the_start_with_a_reason(checkpoint):
    with pytest.raises(StartError, match=r"workspaces 3\.00 GiB"):
        build(settings(checkpoint, **GPU_LIKE), no_pixels, memory=FakeMemory(3 * GIB, step_bytes=3 * GIB))


def test_memory_that_runs_out_all_the_same_is_a_reason_not_a_traceback(checkpoint):
    class TooSmall(FakeMemory):
        def peak_bytes(self, work):
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    with pytest.raises(StartError, match=r"tried to allocate 2\.00 GiB; a smaller max_num_batched_tokens"):
        build(settings(checkpoint, **GPU_LIKE), no_pixels, memory=TooSmall(3 * GIB))


@pytest.mark.parametrize(("taken_bytes", "is_warned"), [(1_000_000, False), (1_000_001, True)])
def test_captured_steps_that_take_more_than_was_kept_are_a_warning(model, taken_bytes, is_warned, caplog):
    caplog.set_level("INFO")
    memory = FakeMemory(GIB, weights_bytes=taken_bytes)  # gone at the second look
    pools = CachePools(cache_spec(model.config, model.dtype), 2, CPU)
    pools.dense.zero_()
    sizes = {"max_num_seqs": 2, "max_model_len": 32, "vocab_size": model.config.text.vocab_size}
    runner = ModelRunner(model, pools, read_pixels=no_pixels, base_seed=0, **sizes)
    recorded = []
    capture_graphs(runner, lambda work: recorded.append(work) or work, memory, 1_000_000)
    assert f"captured {len(recorded)} decode steps" in caplog.text
    assert ("1 bytes more than planned" in caplog.text) == is_warned


def test_nothing_is_kept_for_graphs_that_are_not_captured(checkpoint):
    config, limits = M3Config.from_file(checkpoint), StepLimits(4, 32, 200)
    for enabled in (True, False):
        chosen = settings(checkpoint, enable_cuda_graphs=enabled, **GPU_LIKE)
        use = plan_memory(chosen, config, CPU, torch.float32, limits, FakeMemory(GIB)).use
        assert use.graphs == (graphs_bytes(config, 4, limits) if enabled else 0)


def test_the_largest_steps_are_as_large_as_steps_can_be(model):
    spec = cache_spec(model.config, model.dtype)
    seen = []

    class Watched:
        config, device, dtype, media_segment_len = model.config, model.device, model.dtype, model.media_segment_len

        def encode_media(self, items):
            seen.append(("pictures", sum(item.shape[1] * item.shape[2] // 28**2 for item in items)))
            return model.encode_media([item[:, :56, :56] for item in items])

        def forward(self, token_ids, batch, pools, embeddings=None):
            seen.append((len(token_ids), len(batch.seq_lens), batch.max_seq_len, pools.num_pages))
            return model.forward(token_ids, batch, pools, embeddings)

        def logits(self, hidden):
            return model.logits(hidden)

    run_largest_steps(Watched(), spec, StepLimits(max_num_seqs=3, max_num_batched_tokens=48, max_model_len=100))
    assert seen == [("pictures", 15 * 576), (3, 3, 100, 1), (48, 1, 100, 1)]


@pytest.mark.parametrize(("longest", "lengths"), [(48, [4, 8, 16, 32, 48]), (64, [4, 8, 16, 32, 64]), (5, [4, 5]), (3, [3])])
def test_prompts_of_every_size_class_run_before_a_request_does(model, longest, lengths):
    spec = cache_spec(model.config, model.dtype)
    plans = []

    class Watched(ModelRunner):
        def launch(self, plan):
            plans.append(plan)
            return super().launch(plan)

    pools = CachePools(spec, 64 // spec.page_size, CPU)
    runner = Watched(
        model,
        pools,
        max_num_seqs=1,
        max_model_len=64,
        vocab_size=model.config.text.vocab_size,
        read_pixels=no_pixels,
        base_seed=0,
    )
    compile_prefills(runner, spec.page_size, longest)
    assert [chunk.num_tokens for plan in plans for chunk in plan.chunks] == lengths
    assert plans[-1].released_slots == (0,)


def test_the_sequence_length_is_the_settings_or_the_window():
    assert choose_model_len(settings(), 500) == 500
    assert choose_model_len(settings(max_model_len=400), 500) == 400
    with pytest.raises(StartError, match=r"501.*500"):
        choose_model_len(settings(max_model_len=501), 500)


def test_a_step_has_room_for_every_slot():
    assert choose_step_tokens(settings(), CPU) == 512
    assert choose_step_tokens(settings(max_num_seqs=600), CPU) == 600
    assert choose_step_tokens(settings(max_num_batched_tokens=64), CPU) == 64
    with pytest.raises(StartError, match=r"63.*64"):
        choose_step_tokens(settings(max_num_batched_tokens=63, max_num_seqs=64), CPU)


def test_automatic_device_and_dtype():
    assert choose_device(Device.CPU) == CPU
    assert choose_dtype(Dtype.AUTO, CPU) is torch.float32
    assert choose_dtype(Dtype.AUTO, torch.device("cuda")) is torch.bfloat16
    assert choose_dtype(Dtype.BFLOAT16, CPU) is torch.bfloat16


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device(Device.AUTO) == CPU
    with pytest.raises(StartError, match="no CUDA device"):
        choose_device(Device.CUDA)


def test_every_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert choose_device(Device.AUTO, Shard(3, 4)) == torch.device("cuda", 3)
    with pytest.raises(StartError, match="tensor_parallel_size is 8, but the number of CUDA devices is 4"):
        choose_device(Device.CUDA, Shard(0, 8))


def test_an_engine_announces_what_fits_both_window_and_cache(checkpoint):
    parts = build(settings(checkpoint, cache_bytes=200_000, device="cpu"), no_pixels)
    assert parts.ready.page_size == 16
    assert parts.ready.vocab_size == 256
    assert parts.ready.max_model_len == parts.ready.num_pages * 16 < 8192
    assert build(settings(checkpoint, max_model_len=100, device="cpu"), no_pixels).ready.max_model_len == 100


def test_a_broken_checkpoint_is_a_reason_not_a_traceback(checkpoint, tmp_path):
    with pytest.raises(StartError, match=r"config\.json"):
        build(settings(tmp_path, device="cpu"), no_pixels)
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(StartError, match=r"model\.safetensors"):
        build(settings(tmp_path, device="cpu"), no_pixels)


def test_a_checkpoint_without_a_tokenizer_starts_and_has_no_grammars(checkpoint, caplog):
    assert build(settings(checkpoint, device="cpu", max_model_len=100), no_pixels).grammars is None
    assert "tokenizer" in caplog.text
