import shutil

import pytest
import torch

from server.engine_setup import (
    StartError,
    build,
    cache_budget_bytes,
    choose_device,
    choose_dtype,
    choose_model_len,
    choose_step_tokens,
    num_cache_pages,
)
from server.kvcache.pools import CacheSpec
from server.settings import Device, Dtype, load_settings

CPU = torch.device("cpu")
SPEC = CacheSpec((False, True), num_kv_heads=1, head_dim=8, index_dim=8, page_size=16, dtype=torch.float32)


def settings(model="unused", **values):
    return load_settings({"model": model, **values}, environ={})


def no_pixels(ref):
    raise AssertionError("no request has media")


def test_the_cache_is_as_large_as_asked():
    budget = 10 * SPEC.bytes_per_page + 1
    chosen = settings(cache_bytes=budget, max_num_seqs=1)
    assert cache_budget_bytes(chosen, CPU) == budget
    assert num_cache_pages(chosen, SPEC, 16, budget) == 10


def test_a_cache_without_a_size_is_one_gibibyte_but_no_more_than_can_be_used():
    chosen = settings(max_num_seqs=3)
    budget = cache_budget_bytes(chosen, CPU)
    assert budget == 1 << 30
    assert num_cache_pages(chosen, SPEC, 33, budget) == 3 * 3
    assert num_cache_pages(chosen, SPEC, 1 << 30, budget) == (1 << 30) // SPEC.bytes_per_page


@pytest.mark.parametrize("budget", [-5, 0, SPEC.bytes_per_page - 1])
def test_a_cache_without_room_for_a_page_is_refused_with_both_numbers(budget):
    with pytest.raises(StartError, match=rf"{max(budget, 0)} bytes.*{SPEC.bytes_per_page}"):
        num_cache_pages(settings(cache_bytes=1), SPEC, 16, budget)


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
