"""The device's memory when an engine starts: whether the model can fit, what its steps take, and what is left for the cache.

The largest steps are run once, with a cache of one page that all sequences share, before the real cache is allocated. The
division itself is the arithmetic of `server/sizing.py`.
"""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from server.kvcache.pools import CachePools, CacheSpec
from server.messages import SamplingParams, SlabRef
from server.model.decode_graphs import Recorder
from server.model.m3 import M3Model
from server.model.media_features import MAX_BATCH_TOKENS, Pixels
from server.model.ranks import OneRank, Ranks
from server.model.runner import ModelRunner
from server.scheduler.plan import Chunk, NewSequence, StepPlan
from server.sizing import MemoryPlan, StepLimits, size, table

logger = logging.getLogger(__name__)

_PICTURE_SIDE = 672  # the largest picture of the default resize policy
_PICTURE_TOKENS = (_PICTURE_SIDE // 28) ** 2


class DeviceMemory(Protocol):
    """One device's memory."""

    @property
    def total_bytes(self) -> int:
        """All there is."""

    def free_bytes(self) -> int:
        """What nobody holds, this process's unused blocks included."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """What `work` held at most, beyond what was held before."""


class CudaMemory:
    """The memory of a CUDA device, and torch's allocator on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        """As the driver counts."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        """What the driver calls free after the allocator gave its unused blocks back."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """In whole blocks of the allocator, so what is lost between tensors counts."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def measure(
    plan: MemoryPlan, memory: DeviceMemory, model: M3Model, limits: StepLimits, ranks: Ranks | None = None
) -> MemoryPlan:
    """The division of `plan` again, with what the loaded weights take and the largest steps took, on this rank."""
    ranks = ranks or OneRank()
    weights_bytes = plan.total_bytes - plan.taken_bytes - memory.free_bytes()
    longest = min(limits.max_model_len, max(plan.spec.page_size, ranks.least(plan.num_tokens)))
    largest = replace(limits, max_model_len=longest)
    workspace_bytes = memory.peak_bytes(lambda: run_largest_steps(model, plan.spec, largest, ranks))
    gc.collect()  # the objects of a step may refer to each other
    measured = replace(
        plan,
        taken_bytes=plan.total_bytes - weights_bytes - memory.free_bytes(),  # with the kernels that the steps loaded
        use=replace(plan.use, weights=weights_bytes, workspaces=workspace_bytes),
    )
    logger.info("memory of %s in GiB\n%s", model.device, "\n".join(table(measured)))
    return measured


def capture_graphs(runner: ModelRunner, record: Recorder, memory: DeviceMemory, kept_bytes: int) -> None:
    """Capture the decode steps, and say what that took of the `kept_bytes`."""
    start_s, free_bytes = time.perf_counter(), memory.free_bytes()
    num_graphs = runner.capture_graphs(record)
    taken_bytes = free_bytes - memory.free_bytes()
    seconds = time.perf_counter() - start_s
    logger.info(
        "captured %d decode steps in %.1f s; %s, kept were %s", num_graphs, seconds, size(taken_bytes), size(kept_bytes)
    )
    if taken_bytes > kept_bytes:
        excess = size(taken_bytes - kept_bytes)
        logger.warning("captured decode steps take %s more than planned; so much less stays free", excess)


def run_largest_steps(model: M3Model, spec: CacheSpec, limits: StepLimits, ranks: Ranks | None = None) -> None:
    """Encode as many pictures as are encoded together, then compute the widest decode and the longest prefill.

    What earlier steps leave behind is there in the later ones: features until the prompt is computed, and what the sampler
    keeps of every penalised sequence. Their cache is one page of zeros, the same for all positions of all sequences: the
    memory of a step does not depend on it.
    """
    features: list[Tensor] = []
    if model.config.vision is not None:
        num_pictures = -(-MAX_BATCH_TOKENS // _PICTURE_TOKENS)
        picture = torch.zeros((1, _PICTURE_SIDE, _PICTURE_SIDE, 3), dtype=torch.uint8)
        features = model.encode_media([picture] * num_pictures)
        features.append(torch.cat(features))  # in the order of the step's rows
    pools = CachePools(spec, 1, model.device)
    for lane in (pools.dense, pools.index, pools.sparse):
        lane.zero_()
    runner = ModelRunner(
        model,
        pools,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        vocab_size=model.config.text.vocab_size,
        read_pixels=_no_pixels,
        base_seed=0,
        ranks=ranks,
    )
    pages = (0,) * spec.num_pages(limits.max_model_len)
    runner.execute(_widest_decode(limits, pages))
    runner.execute(_longest_prefill(limits, pages))


def _widest_decode(limits: StepLimits, pages: tuple[int, ...]) -> StepPlan:
    """The last token of as many sequences as there are slots, all as long as the window, each with its costliest sampling."""
    sampling = SamplingParams(max_tokens=1, top_p=0.9, presence_penalty=0.1, num_logprobs=1)
    slots = range(limits.max_num_seqs)
    sequences = tuple(NewSequence(slot, "profile", [0], 1, sampling, ()) for slot in slots)
    chunks = tuple(Chunk(slot, limits.max_model_len - 1, 1, pages, samples=True) for slot in slots)
    return StepPlan(0, (), sequences, chunks)


def _longest_prefill(limits: StepLimits, pages: tuple[int, ...]) -> StepPlan:
    """The last chunk of a prompt that fills the window, with the log-probabilities of its tokens."""
    num_tokens = min(limits.max_num_batched_tokens, limits.max_model_len)
    prompt = [0] * limits.max_model_len
    sampling = SamplingParams(max_tokens=1, num_prompt_logprobs=1)
    sequence = NewSequence(0, "profile", prompt, len(prompt), sampling, ())
    chunk = Chunk(0, len(prompt) - num_tokens, num_tokens, pages, samples=True)
    return StepPlan(1, (0,), (sequence,), (chunk,))


def _no_pixels(ref: SlabRef) -> Pixels:
    raise AssertionError("the largest steps have no media in the slab")
