"""How a GPU's memory is divided: what the weights and the steps need, and how many pages are left for the cache.

Pure arithmetic over bytes. The start of an engine and `m3-server plan` use the same: the one with what it measured, the other
with the estimates of `server/workspaces.py`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from server.kvcache.lanes import Lane
from server.kvcache.pools import CacheSpec
from server.model.weights import Parameter

GIB = 1 << 30


class NoRoomError(Exception):
    """The model and one sequence do not fit; the message says by how much, and what would help."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


def weights_bytes(parameters: Iterable[Parameter], dtype: torch.dtype) -> int:
    """Bytes of one rank's parameters; `dtype` is the model's."""
    return sum(math.prod(parameter.shape) * (parameter.dtype or dtype).itemsize for parameter in parameters)


@dataclass(frozen=True)
class StepLimits:
    """The largest steps that can occur.

    Attributes:
        max_num_seqs: sequences in a step.
        max_num_batched_tokens: tokens in a step.
        max_model_len: tokens of a sequence.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class MemoryUse:
    """What one GPU holds beside the cache, in bytes.

    Attributes:
        weights: parameters, and tables made from them.
        workspaces: what the largest step takes for a moment.
        graphs: captured CUDA graphs.
        features: encoded media of earlier requests.
    """

    weights: int = 0
    workspaces: int = 0
    graphs: int = 0
    features: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.workspaces + self.graphs + self.features


@dataclass(frozen=True)
class MemoryPlan:
    """One GPU's memory.

    Attributes:
        total_bytes: of the GPU.
        kept_bytes: stay free.
        taken_bytes: taken by others: the CUDA context, other processes.
        use: what the model takes.
        spec: shape of a page on this rank.
        max_pages: all that would ever be used; None when more pages keep more prefixes.
        cache_limit_bytes: the operator's `cache_bytes`.
    """

    total_bytes: int
    kept_bytes: int
    taken_bytes: int
    use: MemoryUse
    spec: CacheSpec
    max_pages: int | None
    cache_limit_bytes: int | None = None

    @property
    def left_bytes(self) -> int:
        """What the cache may take; negative when not even the rest fits."""
        return self.total_bytes - self.kept_bytes - self.taken_bytes - self.use.total

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        room_bytes = max(0, self.left_bytes)
        if self.cache_limit_bytes is not None:
            return min(room_bytes, self.cache_limit_bytes) // self.spec.bytes_per_page
        num_pages = room_bytes // self.spec.bytes_per_page
        return num_pages if self.max_pages is None else min(num_pages, self.max_pages)

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_pages * self.spec.page_size

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache's pages."""
        return self.num_pages * self.spec.bytes_per_page

    def missing_bytes(self, num_tokens: int) -> int:
        """What is lacking to hold all of `cache_limit_bytes`, and a sequence of `num_tokens` in it; 0 when it fits."""
        sequence_bytes = self.spec.num_pages(num_tokens) * self.spec.bytes_per_page
        if self.cache_limit_bytes is None:
            return max(0, sequence_bytes - self.left_bytes)
        return max(0, self.cache_limit_bytes - self.left_bytes, sequence_bytes - self.cache_limit_bytes)

    def num_sequences(self, num_tokens: int) -> int:
        """Sequences of `num_tokens` that the cache holds with all lanes on the GPU."""
        return self.num_pages // self.spec.num_pages(num_tokens)

    def num_sequences_with_host(self, num_tokens: int, host_bytes: int | None, moved: Lane, num_hot_pages: int) -> int:
        """Sequences of `num_tokens` when some lanes live in host memory.

        Args:
            num_tokens: length of each.
            host_bytes: this rank's part of the host memory; None for as much as it takes.
            moved: lanes whose pages are kept in host memory, the others stay on the GPU.
            num_hot_pages: pages of every sequence whose moved lanes have a copy on the GPU all the same.
        """
        num_pages = self.spec.num_pages(num_tokens)
        moved_bytes = host_page_bytes(self.spec, moved)
        on_gpu = num_pages * (self.spec.bytes_per_page - moved_bytes) + min(num_pages, num_hot_pages) * moved_bytes
        fits_gpu = self.cache_bytes // on_gpu
        return fits_gpu if host_bytes is None else min(fits_gpu, host_bytes // (num_pages * moved_bytes))


def host_page_bytes(spec: CacheSpec, moved: Lane) -> int:
    """Bytes of one page in the lanes of `moved`."""
    return sum(size for lane, size in spec.lane_bytes.items() if lane & moved)


def table(plan: MemoryPlan) -> list[str]:
    """The division of a GPU's memory as lines of text, in GiB."""
    use, spec = plan.use, plan.spec
    rows = [
        ("in all", plan.total_bytes),
        ("kept free", -plan.kept_bytes),
        ("taken by others", -plan.taken_bytes),
        ("weights", -use.weights),
        ("workspaces", -use.workspaces),
        ("CUDA graphs", -use.graphs),
        ("media features", -use.features),
        ("left for the cache", plan.left_bytes),
    ]
    lines = [f"{num_bytes / GIB:>10.2f}  {what}" for what, num_bytes in rows]
    lanes = ", ".join(f"{lane.name.lower()} {size:,}" for lane, size in spec.lane_bytes.items() if lane.name)
    lines.append(f"a page of {spec.page_size} tokens: {spec.bytes_per_page:,} bytes ({lanes})")
    return lines


def size(num_bytes: int) -> str:
    """In GiB; what is too small for two decimals in bytes."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB // 100 else f"{num_bytes:,} bytes"


def require_room(plan: MemoryPlan, num_tokens: int, *, is_quantised: bool) -> None:
    """Check that one sequence of `num_tokens` fits.

    Raises:
        NoRoomError: by how much it does not, and what the operator could change.
    """
    missing_bytes = plan.missing_bytes(num_tokens)
    if not missing_bytes:
        return
    use, limit_bytes = plan.use, plan.cache_limit_bytes
    sequence = f"a sequence of {num_tokens:,} tokens"
    needs = {
        "weights": use.weights,
        "workspaces": use.workspaces,
        "CUDA graphs": use.graphs,
        "media features": use.features,
        sequence: plan.spec.num_pages(num_tokens) * plan.spec.bytes_per_page,
    }
    listed = ", ".join(f"{what} {size(num_bytes)}" for what, num_bytes in needs.items() if num_bytes)
    limit = "" if limit_bytes is None else f"; cache_bytes is {limit_bytes:,}"
    usable_bytes = plan.total_bytes - plan.kept_bytes - plan.taken_bytes
    raise NoRoomError(
        f"{size(missing_bytes)} of memory are missing. Needed: {listed}{limit}. There: {size(usable_bytes)} of "
        f"{size(plan.total_bytes)}, as {size(plan.kept_bytes)} are kept free and {size(plan.taken_bytes)} are taken by others. "
        f"What would help: {', or '.join(_cures(plan, num_tokens, missing_bytes, is_quantised))}",
        missing_bytes,
    )


def _cures(plan: MemoryPlan, num_tokens: int, missing_bytes: int, is_quantised: bool) -> list[str]:
    """What an operator can change, with numbers where they are known."""
    cures = []
    room_bytes = plan.left_bytes if plan.cache_limit_bytes is None else min(plan.left_bytes, plan.cache_limit_bytes)
    longest = room_bytes // plan.spec.bytes_per_page * plan.spec.page_size
    if 0 < longest < num_tokens:
        cures.append(f"max_model_len {longest} or less")
    if not plan.use.total or (plan.cache_limit_bytes is not None and plan.cache_limit_bytes <= plan.left_bytes):
        return [*cures, f"cache_bytes {room_bytes + missing_bytes} or more"]
    if plan.cache_limit_bytes is not None and plan.left_bytes > 0:
        cures.append(f"cache_bytes {plan.left_bytes} or less")
    if missing_bytes <= plan.kept_bytes:
        share = 1 - (plan.kept_bytes - missing_bytes) / plan.total_bytes
        cures.append(f"gpu_memory_utilization {math.ceil(share * 1000) / 1000:g} or more")
    return [*cures, "more GPUs"] if is_quantised else [*cures, "more GPUs", "an MXFP8 checkpoint"]
