"""Decode steps as CUDA graphs: a step of single tokens is launched with one copy and one call.

A graph holds the kernels of one batch size, with grids for one bound of the context's length. So there is a ladder of batch
sizes and one of lengths, and a step takes the smallest graph that holds it. Rows without a sequence repeat another row: they
choose the same blocks and experts and write nothing. All graphs share the memory of their intermediate results; what comes
out of them lies in buffers of its own, valid until the next step. It knows neither slots nor sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kvcache.pools import CachePools
from server.model.batch_builder import BatchBuilder, host_buffer
from server.scheduler.plan import Chunk

FIRST_CONTEXT = 8192
CONTEXT_FACTOR = 4  # grids are at most so much larger than the longest sequence needs

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], None]], Replay]


class DecodeModel(Protocol):
    """The part of the model that is captured."""

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, pools: CachePools, embeddings: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """[S, vocab]."""


@dataclass(frozen=True)
class DecodeOutput:
    """What a step of B single tokens left, in the buffers of the graphs.

    Attributes:
        slots: [B] int64.
        hidden: [B, hidden] after the final norm.
        logits: [B, vocab] in the model dtype.
    """

    slots: Tensor
    hidden: Tensor
    logits: Tensor


def batch_ladder(max_num_seqs: int) -> list[int]:
    """1 to 8, then four steps to each power of two, up to `max_num_seqs`: less than a fifth of the rows is idle."""
    rungs = list(range(1, 9))
    while rungs[-1] < max_num_seqs:
        rungs.append(rungs[-1] + (1 << (rungs[-1].bit_length() - 1)) // 4)
    return [rung for rung in rungs if rung < max_num_seqs] + [max_num_seqs]


def context_ladder(max_model_len: int) -> list[int]:
    """Bounds of the context's length in tokens, up to `max_model_len`."""
    rungs = []
    rung = FIRST_CONTEXT
    while rung < max_model_len:
        rungs.append(rung)
        rung *= CONTEXT_FACTOR
    return [*rungs, max_model_len]


class CudaRecorder:
    """Captures work as CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Run `work` once, which compiles and loads what it launches, then capture it."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


class DecodeGraphs:
    """The captured steps of one model on its cache."""

    def __init__(
        self,
        model: DecodeModel,
        pools: CachePools,
        builder: BatchBuilder,
        record: Recorder,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Capture all steps. Their first runs read the first token of page 0, which must be finite, and write nothing.

        Args:
            model: on the pools' device.
            pools: the cache.
            builder: of the slots.
            record: makes work repeatable.
            max_num_seqs: top of the ladder of batch sizes.
            max_model_len: top of the ladder of lengths.
        """
        self._model = model
        self._pools = pools
        self._builder = builder
        self._batch_ladder = batch_ladder(max_num_seqs)
        self._context_ladder = context_ladder(max_model_len)
        self._packed = torch.zeros(4 * max_num_seqs, dtype=torch.int64, device=pools.device)
        hidden, logits = self._compute(1, FIRST_CONTEXT)
        self._hidden = hidden.new_zeros((max_num_seqs, hidden.shape[1]))
        self._logits = logits.new_zeros((max_num_seqs, logits.shape[1]))
        self._replays: dict[tuple[int, int], Replay] = {}
        # The largest first: the memory that it needs is enough for all others.
        for context in reversed(self._context_ladder):
            for num_rows in reversed(self._batch_ladder):
                self._replays[num_rows, context] = record(partial(self._step, num_rows, context))

    def __len__(self) -> int:
        """Captured steps."""
        return len(self._replays)

    def launch(self, chunks: Sequence[Chunk]) -> DecodeOutput:
        """Run the step of these single-token chunks; the next one overwrites its output."""
        num_chunks, max_seq_len = len(chunks), max(chunk.start for chunk in chunks) + 1
        num_rows = next(rung for rung in self._batch_ladder if rung >= num_chunks)
        context = next(rung for rung in self._context_ladder if rung >= max_seq_len)
        packed = host_buffer(self._builder.pack_decodes(chunks, num_rows).flatten(), self._pools.device)
        self._packed[: 4 * num_rows].copy_(packed, non_blocking=True)
        self._replays[num_rows, context]()
        return DecodeOutput(self._packed[:num_chunks], self._hidden[:num_chunks], self._logits[:num_chunks])

    def _step(self, num_rows: int, context: int) -> None:
        hidden, logits = self._compute(num_rows, context)
        self._hidden[:num_rows].copy_(hidden)
        self._logits[:num_rows].copy_(logits)

    def _compute(self, num_rows: int, context: int) -> tuple[Tensor, Tensor]:
        model_input = self._builder.decode_input(self._packed[: 4 * num_rows].view(4, num_rows), context)
        hidden = self._model.forward(model_input.token_ids, model_input.batch, self._pools, None)
        return hidden, self._model.logits(hidden)
