"""How an engine comes up: device and dtype, the division of its memory, model, runner and scheduler, and a first run.

Whatever makes a start impossible raises `StartError` with a reason for the operator. It knows neither sockets nor the loop.
"""

import logging
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from server.engine_memory import CudaMemory, DeviceMemory, capture_graphs, measure
from server.grammars import GrammarError, GrammarTokenizer
from server.kvcache.pools import CachePools
from server.messages import Ready, SamplingParams
from server.model.checkpoint import CheckpointError
from server.model.config import ConfigError, M3Config, cache_spec
from server.model.decode_graphs import CudaRecorder
from server.model.grammar import GrammarCompiler
from server.model.m3 import M3Model
from server.model.media_features import PixelReader
from server.model.progress import Progress
from server.model.ranks import OneRank, Ranks
from server.model.runner import ModelRunner
from server.model.shard import Shard
from server.model.weights import parameters
from server.scheduler.config import SchedulerConfig
from server.scheduler.plan import Chunk, NewSequence, StepPlan
from server.scheduler.scheduler import Scheduler
from server.settings import Device, Dtype, Settings
from server.sizing import GIB, MemoryPlan, MemoryUse, NoRoomError, StepLimits, require_room
from server.workspaces import estimated_use

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
        overlap_steps: plan and launch a step while the one before it runs.
    """

    scheduler: Scheduler
    runner: ModelRunner
    ready: Ready
    grammars: GrammarCompiler | None
    overlap_steps: bool


def choose_device(setting: Device, shard: Shard | None = None) -> torch.device:
    """The device that `setting` names; auto takes CUDA when there is a GPU. Each of several ranks has the GPU of its number."""
    shard = shard or Shard()
    if setting is Device.CPU or (setting is Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartError("device is cuda, but no CUDA device is available")
    if shard.world == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if shard.world > torch.cuda.device_count():
        raise StartError(
            f"tensor_parallel_size is {shard.world}, but the number of CUDA devices is {torch.cuda.device_count()}"
        )
    return torch.device("cuda", shard.rank)


def choose_dtype(setting: Dtype, device: torch.device) -> torch.dtype:
    """The dtype that `setting` names; auto is bfloat16 on a GPU and float32 on a CPU."""
    if setting is Dtype.AUTO:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if setting is Dtype.BFLOAT16 else torch.float32


def limit_cpu_threads(num_ranks: int) -> None:
    """Leave one core to the front when there are several, and divide the others; OMP_NUM_THREADS has decided already if set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (len(os.sched_getaffinity(0)) - 1) // num_ranks))


def choose_model_len(settings: Settings, window: int) -> int:
    """Longest sequence before the cache is considered, in tokens; `window` is the model's."""
    if settings.max_model_len is not None and settings.max_model_len > window:
        raise StartError(f"max_model_len is {settings.max_model_len}, but the model's window has {window} tokens")
    return settings.max_model_len or window


def require_cut(settings: Settings) -> None:
    """Say before other ranks are started that the model cannot be cut for so many.

    Raises:
        StartError: which part resists; or there is no configuration.
    """
    try:
        parameters(M3Config.from_file(settings.model), Shard(0, settings.tensor_parallel_size))
    except ConfigError as error:
        raise StartError(str(error)) from error
    except ValueError as error:
        raise StartError(f"tensor_parallel_size is {settings.tensor_parallel_size}: {error}") from error


def build(
    settings: Settings,
    read_pixels: PixelReader,
    progress: Progress | None = None,
    memory: DeviceMemory | None = None,
    ranks: Ranks | None = None,
) -> EngineParts:
    """Load this rank's share of the model and build everything around it.

    Args:
        settings: the operator's.
        read_pixels: bytes of media in the slab.
        progress: follows the load; a bar on stderr if None.
        memory: the device's. If None, that of the CUDA device; on a CPU nothing is measured.
        ranks: those that compute the model together, each of which builds; one if None.

    Raises:
        StartError: settings, checkpoint or memory do not allow it.
    """
    ranks = ranks or OneRank()
    device = choose_device(settings.device, ranks.shard)
    dtype = choose_dtype(settings.dtype, device)
    if device.type == "cpu":
        limit_cpu_threads(ranks.shard.world)
    elif memory is None:
        memory = CudaMemory(device)
    try:
        config = M3Config.from_file(settings.model)
        model_len = choose_model_len(settings, config.text.max_position_embeddings)
        limits = StepLimits(settings.max_num_seqs, choose_step_tokens(settings, device), model_len)
        memory_plan = plan_memory(settings, config, device, dtype, limits, memory, ranks.shard)
        is_quantised = config.quantization is not None
        required = settings.max_model_len or memory_plan.spec.page_size
        require_room(memory_plan, required, is_quantised=is_quantised)
        model = M3Model.load(settings.model, config, device, dtype, ranks.shard, progress, ranks.collective)
        if memory is not None:
            memory_plan = measure(memory_plan, memory, model, limits, ranks)
            require_room(memory_plan, required, is_quantised=is_quantised)
        memory_plan = replace(memory_plan, max_pages=ranks.least(memory_plan.num_pages))
        return assemble(settings, model, memory_plan, memory, limits, read_pixels, ranks)
    except (ConfigError, CheckpointError, NoRoomError) as error:
        raise StartError(str(error)) from error
    except torch.OutOfMemoryError as error:
        cure = "a smaller max_num_batched_tokens or max_num_seqs would help, or a lower gpu_memory_utilization"
        raise StartError(f"memory ran out, in spite of all estimates: {error}; {cure}") from error


def plan_memory(
    settings: Settings,
    config: M3Config,
    device: torch.device,
    dtype: torch.dtype,
    limits: StepLimits,
    memory: DeviceMemory | None,
    shard: Shard | None = None,
) -> MemoryPlan:
    """The division of the device's memory before anything is loaded; without `memory`, only the cache's size is known."""
    shard = shard or Shard()
    spec = cache_spec(config, dtype, shard)
    max_pages = limits.max_num_seqs * spec.num_pages(limits.max_model_len)  # what all slots can fill
    if memory is None:
        return MemoryPlan(settings.cache_bytes or CPU_CACHE_BYTES, 0, 0, MemoryUse(), spec, max_pages, settings.cache_bytes)
    total_bytes = memory.total_bytes
    use = estimated_use(config, shard, dtype, limits, choose_feature_cache_bytes(settings, device))
    return MemoryPlan(
        total_bytes=total_bytes,
        kept_bytes=int(total_bytes * (1 - settings.gpu_memory_utilization)),
        taken_bytes=total_bytes - memory.free_bytes(),
        use=use if settings.enable_cuda_graphs else replace(use, graphs=0),
        spec=spec,
        max_pages=None if settings.enable_prefix_caching else max_pages,
        cache_limit_bytes=settings.cache_bytes,
    )


def assemble(
    settings: Settings,
    model: M3Model,
    memory_plan: MemoryPlan,
    memory: DeviceMemory | None,
    limits: StepLimits,
    read_pixels: PixelReader,
    ranks: Ranks,
) -> EngineParts:
    """Allocate the cache, put scheduler and runner around it, and capture decode steps on a GPU."""
    spec, num_pages, vocab_size = memory_plan.spec, memory_plan.num_pages, model.config.text.vocab_size
    sizes = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        page_size=spec.page_size,
        num_pages=num_pages,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    logger.info(
        "cache: %d pages of %d tokens, %.2f GiB on %s; longest sequence %d tokens, %d of them at a time",
        *(num_pages, spec.page_size, memory_plan.cache_bytes / GIB, model.device, sizes.max_seq_len),
        memory_plan.num_sequences(sizes.max_seq_len),
    )
    grammars = load_grammars(settings.model, vocab_size) if ranks.shard.rank == 0 else None
    runner = ModelRunner(
        model,
        CachePools(spec, num_pages, model.device),
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_seq_len,
        vocab_size=vocab_size,
        read_pixels=read_pixels,
        base_seed=secrets.randbits(63),
        feature_cache_bytes=choose_feature_cache_bytes(settings, model.device),
        grammars=grammars,
        ranks=ranks,
    )
    warm_up(runner)
    if model.device.type == "cuda":
        compile_prefills(runner, spec.page_size, min(sizes.max_num_batched_tokens, sizes.max_seq_len))
    if settings.enable_cuda_graphs and memory is not None and model.device.type == "cuda":
        capture_graphs(runner, CudaRecorder(), memory, memory_plan.use.graphs)
    lane_page_bytes = {str(lane.name).lower(): num_bytes for lane, num_bytes in spec.lane_bytes.items()}
    ready = Ready(num_pages, spec.page_size, sizes.max_seq_len, vocab_size, lane_page_bytes)
    return EngineParts(Scheduler(sizes), runner, ready, grammars, choose_overlap(settings, model.device))


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


def choose_overlap(settings: Settings, device: torch.device) -> bool:
    """Whether steps overlap; where host and device are one there is nothing to hide."""
    return device.type == "cuda" if settings.overlap_steps is None else settings.overlap_steps


def choose_feature_cache_bytes(settings: Settings, device: torch.device) -> int:
    """Device memory for encoded media."""
    default = GPU_FEATURE_CACHE_BYTES if device.type == "cuda" else CPU_FEATURE_CACHE_BYTES
    return default if settings.media_feature_cache_bytes is None else settings.media_feature_cache_bytes


def warm_up(runner: ModelRunner) -> None:
    """Two short sequences on the first page, past the scheduler: a model that cannot run fails the start, not a request.

    They sample in different ways, so that no request waits until a kernel is compiled.
    """
    filtered = SamplingParams(max_tokens=2, top_k=2, top_p=0.9)
    adjusted = SamplingParams(max_tokens=2, top_k=2, presence_penalty=1.0, num_logprobs=1)
    for number, params in enumerate((filtered, adjusted)):
        sequence = NewSequence(0, "warm-up", [0, 0], 2, params, ())
        runner.execute(StepPlan(3 * number, (), (sequence,), (Chunk(0, 0, 2, (0,), samples=True),)))
        runner.execute(StepPlan(3 * number + 1, (), (), (Chunk(0, 2, 1, (), samples=True),)))
        runner.execute(StepPlan(3 * number + 2, (0,), (), ()))


def compile_prefills(runner: ModelRunner, page_size: int, longest: int) -> None:
    """Run prompts of 4, 8, 16 ... and `longest` tokens on the first pages, past the scheduler.

    Kernels and their tiles are chosen by the number of tokens; each choice is compiled at its first use, so not by a request.
    """
    lengths = [1 << power for power in range(2, (longest - 1).bit_length())] + [longest]
    for number, length in enumerate(lengths):
        sequence = NewSequence(0, "compile", [0] * length, length, SamplingParams(max_tokens=1), ())
        pages = tuple(range(-(-length // page_size)))
        runner.execute(StepPlan(2 * number, (), (sequence,), (Chunk(0, 0, length, pages, samples=True),)))
        runner.execute(StepPlan(2 * number + 1, (0,), (), ()))
