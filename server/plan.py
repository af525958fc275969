"""`m3-server plan`: what a number of GPUs holds, before there is one.

Divides the memory with the code that sizes a real engine; only what an engine measures at its start is estimated here.
"""

import dataclasses
import enum
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from server.kvcache.lanes import Lane
from server.model.config import RELEASED_DIR, ConfigError, M3Config, cache_spec
from server.model.quantization import Quantization
from server.model.shard import Shard
from server.model.weights import parameters
from server.sizing import GIB, MemoryPlan, NoRoomError, StepLimits, host_page_bytes, require_room, table, weights_bytes
from server.workspaces import CONTEXT_BYTES, estimated_use

RELEASED = "M3"
CONTEXTS = (8_192, 32_768, 131_072, 524_288, 1_048_576)
IDLE_LANES = Lane.INDEX | Lane.SPARSE


class WeightFormat(enum.StrEnum):
    """What the decoder's projections are stored as."""

    BF16 = "bf16"
    MXFP8 = "mxfp8"


class PlanError(Exception):
    """There is no such plan; the message says why, and `missing_bytes` how much memory each GPU lacks, if that is why."""

    def __init__(self, message: str, missing_bytes: int | None = None) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


@dataclass(frozen=True)
class PlanRequest:
    """What is asked.

    Attributes:
        model: folder of a checkpoint, or `M3` for the released configuration.
        num_gpus: ranks.
        gpu_bytes: memory of one.
        context: longest sequence in tokens; what fits, at most the model's window, if None.
        dtype: of the weights; as the checkpoint says if None.
        gpu_memory_utilization, max_num_seqs, max_num_batched_tokens, feature_cache_bytes: as in the settings.
        host_bytes: host memory for cache pages, all ranks together; as much as it takes if None.
    """

    model: str
    num_gpus: int
    gpu_bytes: int
    context: int | None
    dtype: WeightFormat | None
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    feature_cache_bytes: int
    host_bytes: int | None


@dataclass(frozen=True)
class ContextRow:
    """Sequences of one length that run at the same time.

    Attributes:
        context: tokens of each.
        on_gpu: with all lanes on the GPU.
        sparse_on_host: with the sparse lane in host memory.
        idle: that can wait for their next turn with the index lane there, too.
        host_bytes: host memory that one of them takes, all ranks together, both lanes.
    """

    context: int
    on_gpu: int
    sparse_on_host: int
    idle: int
    host_bytes: int


@dataclass(frozen=True)
class DeploymentPlan:
    """The answer.

    Attributes:
        dtype: of the weights.
        weights_total: bytes of the checkpoint's tensors.
        memory: of each GPU.
        context: longest sequence with all lanes on the GPU.
        rows: sequences by context.
    """

    dtype: WeightFormat
    weights_total: int
    memory: MemoryPlan
    context: int
    rows: tuple[ContextRow, ...]


def make_plan(request: PlanRequest) -> DeploymentPlan:
    """Divide the memory.

    Raises:
        PlanError: the configuration cannot be read, cut for that many GPUs, or held by them.
    """
    try:
        config = _config(request)
        window = config.text.max_position_embeddings
        if request.context is not None and request.context > window:
            raise PlanError(f"the context is {request.context:,} tokens, but the model's window has {window:,}")
        memory = _memory(request, config)
        require_room(memory, request.context or memory.spec.page_size, is_quantised=config.quantization is not None)
    except NoRoomError as error:
        raise PlanError(str(error), error.missing_bytes) from error
    except (ConfigError, ValueError) as error:
        raise PlanError(str(error)) from error
    longest = request.context or window
    contexts = sorted({length for length in CONTEXTS if length < longest} | {longest})
    return DeploymentPlan(
        dtype=WeightFormat.BF16 if config.quantization is None else WeightFormat.MXFP8,
        weights_total=weights_bytes(parameters(config, Shard()), torch.bfloat16),
        memory=memory,
        context=request.context or min(window, memory.num_tokens),
        rows=tuple(_row(request, memory, length, config.text.topk_blocks) for length in contexts),
    )


def _config(request: PlanRequest) -> M3Config:
    config = M3Config.from_file(RELEASED_DIR if request.model == RELEASED else Path(request.model))
    match request.dtype:
        case WeightFormat.BF16:
            return dataclasses.replace(config, quantization=None)
        case WeightFormat.MXFP8 if config.quantization is None:
            return dataclasses.replace(config, quantization=Quantization(ignored_layers=()))
    return config


def _memory(request: PlanRequest, config: M3Config) -> MemoryPlan:
    shard = Shard(0, request.num_gpus)
    spec = cache_spec(config, torch.bfloat16, shard)
    max_model_len = request.context or config.text.max_position_embeddings
    limits = StepLimits(request.max_num_seqs, request.max_num_batched_tokens, max_model_len)
    return MemoryPlan(
        total_bytes=request.gpu_bytes,
        kept_bytes=int(request.gpu_bytes * (1 - request.gpu_memory_utilization)),
        taken_bytes=CONTEXT_BYTES,
        use=estimated_use(config, shard, torch.bfloat16, limits, request.feature_cache_bytes),
        spec=spec,
        max_pages=None,
    )


def _row(request: PlanRequest, memory: MemoryPlan, context: int, topk_blocks: int) -> ContextRow:
    host_bytes = None if request.host_bytes is None else request.host_bytes // request.num_gpus
    pages_on_host = memory.spec.num_pages(context) * request.num_gpus
    return ContextRow(
        context=context,
        on_gpu=memory.num_sequences(context),
        sparse_on_host=memory.num_sequences_with_host(context, host_bytes, Lane.SPARSE, topk_blocks),
        idle=memory.num_sequences_with_host(context, host_bytes, IDLE_LANES, 0),
        host_bytes=pages_on_host * host_page_bytes(memory.spec, IDLE_LANES),
    )


def report(request: PlanRequest, plan: DeploymentPlan) -> str:
    """The plan for people."""
    gpus = f"{request.num_gpus} GPU{'s' if request.num_gpus > 1 else ''} of {request.gpu_bytes / GIB:g} GiB"
    host = (
        "as much host memory as it takes" if request.host_bytes is None else f"{request.host_bytes / GIB:g} GiB of host memory"
    )
    lines = [
        f"{request.model}, {plan.dtype.value}, {plan.weights_total / GIB:.2f} GiB of weights, on {gpus}",
        "",
        "One GPU, GiB (workspaces, graphs and what others take are estimates; a start measures them)",
        *table(plan.memory),
        f"cache: {plan.memory.num_pages:,} pages, {plan.memory.num_tokens:,} tokens; longest sequence {plan.context:,} tokens",
        "",
        f"Sequences at their full length, no shared prefixes, {host} for the host tier",
        "     context   on the GPU   sparse lane on the host   idle, index lane too   host GiB each",
    ]
    lines += [
        f"{row.context:>12,} {row.on_gpu:>12,} {row.sparse_on_host:>25,} {row.idle:>22,} {row.host_bytes / GIB:>15.2f}"
        for row in plan.rows
    ]
    lines += [
        "",
        "Dense K/V never leave the GPU. While a sequence runs, its index keys stay there too, and as many of its sparse pages",
        "as a step selects. This version keeps all lanes on the GPU: the host tier is planned.",
    ]
    return "\n".join(lines)


def as_json(plan: DeploymentPlan) -> str:
    """The plan for machines."""
    memory = plan.memory
    return json.dumps(
        {
            "fits": True,
            "dtype": plan.dtype,
            "weights_total_bytes": plan.weights_total,
            "gpu": {
                "total_bytes": memory.total_bytes,
                "kept_bytes": memory.kept_bytes,
                "taken_bytes": memory.taken_bytes,
                **{f"{name}_bytes": value for name, value in dataclasses.asdict(memory.use).items()},
                "left_bytes": memory.left_bytes,
            },
            "page": {
                "num_tokens": memory.spec.page_size,
                "num_bytes": memory.spec.bytes_per_page,
                **{f"{lane.name.lower()}_bytes": size for lane, size in memory.spec.lane_bytes.items() if lane.name},
            },
            "num_pages": memory.num_pages,
            "num_tokens": memory.num_tokens,
            "context": plan.context,
            "contexts": [dataclasses.asdict(row) for row in plan.rows],
        },
        indent=2,
    )


def run(request: PlanRequest, *, prints_json: bool) -> int:
    """Print the plan, or why there is none; returns the exit code."""
    try:
        plan = make_plan(request)
    except PlanError as error:
        if prints_json:
            print(json.dumps({"fits": False, "missing_bytes": error.missing_bytes, "reason": str(error)}))
        else:
            print(f"m3-server plan: {error}", file=sys.stderr)
        return 1
    print(as_json(plan) if prints_json else report(request, plan))
    return 0
