"""How an engine comes up: device and dtype, the size of the cache, model, runner and scheduler, and a first run.

Whatever makes a start impossible raises `StartError` with a reason for the operator. It knows neither sockets nor the loop.
"""

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from server.grammars import GrammarError, GrammarTokenizer
from server.kvcache.pools import CachePools, CacheSpec
from server.messages import Ready, SamplingParams
from server.model.checkpoint import CheckpointError
from server.model.config import ConfigError, M3Config, cache_spec
from server.model.grammar import GrammarCompiler
from server.model.m3 import M3Model
from server.model.media_features import PixelReader
from server.model.progress import Progress
from server.model.runner import ModelRunner
from server.scheduler.config import SchedulerConfig
from server.scheduler.plan import Chunk, NewSequence, StepPlan
from server.scheduler.scheduler import Scheduler
from server.settings import Device, Dtype, Settings

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 8192
CPU_FEATURE_CACHE_BYTES = 64 << 20
GPU_FEATURE_CACHE_BYTES = 1 << 30


class StartError(Exception):
    """The engine cannot start; the message tells the operator why."""


@dataclass(frozen=True)
class EngineParts:
    """What the loop needs.

    Attributes:
        scheduler: empty.
        runner: warm.
        ready: the limits to announce.
        grammars: shared with the runner; None when the checkpoint's tokenizer cannot be used for grammars.
    """

    scheduler: Scheduler
    runner: ModelRunner
    ready: Ready
    grammars: GrammarCompiler | None


def choose_device(setting: Device) -> torch.device:
    """The device that `setting` names; auto takes CUDA when there is a GPU."""
    if setting is Device.CPU or (setting is Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartError("device is cuda, but no CUDA device is available")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(setting: Dtype, device: torch.device) -> torch.dtype:
    """The dtype that `setting` names; auto is bfloat16 on a GPU and float32 on a CPU."""
    if setting is Dtype.AUTO:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if setting is Dtype.BFLOAT16 else torch.float32


def limit_cpu_threads() -> None:
    """Leave one core to the front when there are several; OMP_NUM_THREADS, if set, has decided already."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))


def choose_model_len(settings: Settings, window: int) -> int:
    """Longest sequence before the cache is considered, in tokens; `window` is the model's."""
    if settings.max_model_len is not None and settings.max_model_len > window:
        raise StartError(f"max_model_len is {settings.max_model_len}, but the model's window has {window} tokens")
    return settings.max_model_len or window


def cache_budget_bytes(settings: Settings, device: torch.device) -> int:
    """Bytes for the cache, read after the weights are on the device."""
    if settings.cache_bytes is not None:
        return settings.cache_bytes
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes = int(total_bytes * (1 - settings.gpu_memory_utilization))
    logger.info(
        "GPU memory: %.1f GiB in all, %.1f free after the weights, %.1f kept for activations",
        *(num_bytes / (1 << 30) for num_bytes in (total_bytes, free_bytes, reserved_bytes)),
    )
    return free_bytes - reserved_bytes


def num_cache_pages(settings: Settings, spec: CacheSpec, model_len: int, budget_bytes: int) -> int:
    """Pages that the budget holds; without `cache_bytes`, no more than all slots could fill."""
    num_pages = budget_bytes // spec.bytes_per_page
    if settings.cache_bytes is None:
        num_pages = min(num_pages, settings.max_num_seqs * -(-model_len // spec.page_size))
    if num_pages < 1:
        raise StartError(
            f"the cache may take {max(budget_bytes, 0)} bytes, but one page of {spec.page_size} tokens takes "
            f"{spec.bytes_per_page}; raise cache_bytes"
        )
    return num_pages


def build(settings: Settings, read_pixels: PixelReader, progress: Progress | None = None) -> EngineParts:
    """Load the model and build everything around it; `progress` follows the load, a bar on stderr when None.

    Raises:
        StartError: settings, checkpoint or memory do not allow it.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    if device.type == "cpu":
        limit_cpu_threads()
    try:
        config = M3Config.from_file(settings.model)
        model = M3Model.load(settings.model, config, device, dtype, progress=progress)
    except (ConfigError, CheckpointError) as error:
        raise StartError(str(error)) from error
    spec = cache_spec(config, dtype)
    model_len = choose_model_len(settings, config.text.max_position_embeddings)
    num_pages = num_cache_pages(settings, spec, model_len, cache_budget_bytes(settings, device))
    sizes = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=choose_step_tokens(settings, device),
        max_model_len=model_len,
        page_size=spec.page_size,
        num_pages=num_pages,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    logger.info(
        "cache: %d pages of %d tokens, %.2f GiB on %s; longest sequence %d tokens",
        *(num_pages, spec.page_size, num_pages * spec.bytes_per_page / (1 << 30), device, sizes.max_seq_len),
    )
    grammars = load_grammars(settings.model, config.text.vocab_size)
    runner = ModelRunner(
        model,
        CachePools(spec, num_pages, device),
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_seq_len,
        vocab_size=config.text.vocab_size,
        read_pixels=read_pixels,
        base_seed=secrets.randbits(63),
        feature_cache_bytes=choose_feature_cache_bytes(settings, device),
        grammars=grammars,
    )
    warm_up(runner)
    ready = Ready(num_pages, spec.page_size, sizes.max_seq_len, config.text.vocab_size)
    return EngineParts(Scheduler(sizes), runner, ready, grammars)


def load_grammars(model_dir: Path, vocab_size: int) -> GrammarCompiler | None:
    """What the sampler needs for grammars; None, with a warning, when the checkpoint does not allow any."""
    try:
        return GrammarCompiler(GrammarTokenizer(model_dir, vocab_size))
    except GrammarError as error:
        logger.warning("requests with a grammar will be refused: %s", error)
        return None


def choose_step_tokens(settings: Settings, device: torch.device) -> int:
    """Token budget of one step; every slot must be able to decode in it."""
    default = GPU_STEP_TOKENS if device.type == "cuda" else CPU_STEP_TOKENS
    num_tokens = settings.max_num_batched_tokens or max(default, settings.max_num_seqs)
    if num_tokens < settings.max_num_seqs:
        raise StartError(f"max_num_batched_tokens is {num_tokens}, but max_num_seqs is {settings.max_num_seqs}")
    return num_tokens


def choose_feature_cache_bytes(settings: Settings, device: torch.device) -> int:
    """Device memory for encoded media; on a GPU it comes out of what `gpu_memory_utilization` leaves."""
    default = GPU_FEATURE_CACHE_BYTES if device.type == "cuda" else CPU_FEATURE_CACHE_BYTES
    return default if settings.media_feature_cache_bytes is None else settings.media_feature_cache_bytes


def warm_up(runner: ModelRunner) -> None:
    """One short sequence on the first page, past the scheduler: a model that cannot run fails the start, not a request."""
    sequence = NewSequence(0, "warm-up", [0, 0], 2, SamplingParams(max_tokens=2), ())
    runner.execute(StepPlan(0, (), (sequence,), (Chunk(0, 0, 2, (0,), samples=True),)))
    runner.execute(StepPlan(1, (), (), (Chunk(0, 2, 1, (), samples=True),)))
    runner.execute(StepPlan(2, (0,), (), ()))
