"""The model runner: carries out step plans on one device and says what came of them.

Launching a step only enqueues its work: the host waits for the device where a sequence's rules need the value of the token
before, and where somebody asked for the log-probabilities of a prompt. A launch applies the plan's differences to the slots,
builds the batch, runs the model and samples. A fault of one sequence (media, non-finite logits) becomes a `SlotFailure` and
leaves the others alone; anything else raises. The runner decides nothing about requests or pages.

With several ranks each has a runner, and all launch the same plans. Rank 0 samples and the others take its tokens over; a
sequence whose media one of them cannot have fails on all.
"""

import itertools
import logging
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kvcache.pools import CachePools
from server.model.batch_builder import BatchBuilder
from server.model.decode_graphs import DecodeGraphs, Recorder
from server.model.feature_cache import FeatureCache
from server.model.grammar import GrammarCompiler
from server.model.media_features import FeatureRows, MediaEncoder, MediaFeatures, PixelReader
from server.model.pending_sample import PendingSample
from server.model.pending_step import PendingStep
from server.model.prompt_logprobs import PromptScorer
from server.model.ranks import OneRank, Ranks
from server.model.sampler import Sampler
from server.model.sampling_slot import SamplingRow
from server.scheduler.plan import Chunk, SlotFailure, StepPlan, StepResult

logger = logging.getLogger(__name__)


class Model(MediaEncoder, Protocol):
    """What the runner asks of a model."""

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, pools: CachePools, embeddings: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Hidden states [T, hidden] after the final norm; `embeddings` are rows [n] int64 and features [n, hidden]."""

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """[S, vocab]."""


class _Computed(NamedTuple):
    """What the model made of B chunks.

    Attributes:
        slots: [B] int64.
        hidden: [T, hidden] after the final norm.
        logits: [T, vocab], where a graph computed them already.
    """

    slots: Tensor
    hidden: Tensor
    logits: Tensor | None


class ModelRunner:
    """Runs step plans. One per device, used by one thread."""

    def __init__(
        self,
        model: Model,
        pools: CachePools,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        read_pixels: PixelReader,
        base_seed: int,
        grammars: GrammarCompiler | None = None,
        poison_pages: bool = False,
        feature_cache_bytes: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        """Allocate the slots.

        Args:
            model: on the pools' device.
            pools: the cache.
            max_num_seqs: slots.
            max_model_len: bound of a sequence's length.
            vocab_size: width of the logits.
            read_pixels: bytes of a slab range; raises when the range was reused.
            base_seed: for sequences without a seed.
            grammars: without it, a sequence with a grammar fails.
            poison_pages: fill fresh pages with NaN before use, so that a test sees every read of stale memory.
            feature_cache_bytes: device memory for encoded media that later requests may show again.
            ranks: those that compute the model together; one if None.
        """
        self._model = model
        self._pools = pools
        self._poison_pages = poison_pages
        self._builder = BatchBuilder(max_num_seqs, max_model_len, pools.page_size, pools.device)
        self._media = MediaFeatures(model, read_pixels, pools.device, feature_cache_bytes)
        self._scorer = PromptScorer(pools.device)
        self._sampler = Sampler(max_num_seqs, vocab_size, pools.device, base_seed, grammars)
        self._ranks = ranks or OneRank()
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._latest: PendingStep | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def feature_cache(self) -> FeatureCache:
        """Encoded media that later requests may show again."""
        return self._media.cache

    def forget_media(self, slot: int) -> None:
        """Encode the slot's media anew for whoever shows them next: rank 0 saw its sequence fail."""
        self._media.forget(slot)

    @torch.inference_mode()
    def capture_graphs(self, record: Recorder) -> int:
        """From now on, run decode steps as graphs. Every page must be free, and the first token of page 0 finite.

        Returns:
            How many were captured.
        """
        self._graphs = DecodeGraphs(
            self._model,
            self._pools,
            self._builder,
            record,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
        )
        return len(self._graphs)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step behind the ones before it; at most one of these may still be waited for.

        Raises whatever the model raises; then every sequence of the plan is lost, and no other.
        """
        self._take_over(plan)
        self._latest = self._run(plan.chunks)
        return self._latest

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end; raises like `launch` and `PendingStep.wait`."""
        return self.launch(plan).wait()

    @property
    def _is_lead(self) -> bool:
        return self._ranks.shard.rank == 0

    def _take_over(self, plan: StepPlan) -> None:
        """Apply the plan's differences to the slots and their page tables."""
        for slot in plan.released_slots:
            self._builder.release(slot)
            self._media.release(slot)
            self._scorer.release(slot)
            self._sampler.release(slot)
        for sequence in plan.new_sequences:
            self._builder.admit(sequence)
            self._media.admit(sequence.slot, sequence.media)
            self._scorer.admit(sequence)
            if self._is_lead:
                self._sampler.admit(sequence)
        fresh_pages = self._builder.append_pages(plan.chunks)
        if self._poison_pages:
            self._pools.poison(fresh_pages)

    def _run(self, planned: tuple[Chunk, ...]) -> PendingStep:
        chunks, media_rows, failures = self._collect_media(planned)
        if not chunks:
            return PendingStep(self._pools.device, None, failures, (), self._media.forget)
        computed = self._compute(chunks, media_rows)
        scores, faults = self._scorer.score(chunks, computed.hidden, self._model.logits)
        sample = self._sample(chunks, computed)
        return PendingStep(self._pools.device, sample, failures + faults, scores, self._media.forget)

    def _compute(self, chunks: list[Chunk], media_rows: list[list[FeatureRows]]) -> _Computed:
        """Run the model, by a graph if one was captured for such a step."""
        if self._graphs is not None and chunks[-1].num_tokens == 1 and not any(media_rows):
            output = self._graphs.launch(chunks)
            return _Computed(output.slots, output.hidden, output.logits)
        model_input = self._builder.build(chunks)
        embeddings = self._place_media(chunks, media_rows)
        hidden = self._model.forward(model_input.token_ids, model_input.batch, self._pools, embeddings)
        return _Computed(model_input.slots, hidden, None)

    def _sample(self, chunks: list[Chunk], computed: _Computed) -> PendingSample | None:
        """Choose a token after every chunk that is its sequence's last; the next step finds them on the device."""
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        if not sampling:
            return None
        slots, hidden, logits = computed
        sample = None
        if len(sampling) < hidden.shape[0]:
            ends = torch.tensor(list(itertools.accumulate(chunk.num_tokens for chunk in chunks)))
            index = self._builder.to_device(torch.stack([torch.tensor(sampling), ends[sampling] - 1]))
            slots, hidden = slots[index[0]], hidden[index[1]]
            logits = None if logits is None else logits[index[1]]
        if logits is None:
            logits = self._model.logits(hidden)
        if self._is_lead:
            rows = [SamplingRow(chunks[i].slot, chunks[i].start + chunks[i].num_tokens) for i in sampling]
            sample = self._choose(rows, logits)
        token_ids = torch.empty(len(sampling), dtype=torch.int64, device=slots.device) if sample is None else sample.token_ids
        self._ranks.share(token_ids)
        self._builder.set_last_tokens(slots, token_ids)
        return sample

    def _choose(self, rows: list[SamplingRow], logits: Tensor) -> PendingSample:
        if self._sampler.needs_history(rows) and self._latest is not None:
            self._latest.settle()
        return self._sampler.launch(logits, rows)

    def _collect_media(self, chunks: tuple[Chunk, ...]) -> tuple[list[Chunk], list[list[FeatureRows]], list[SlotFailure]]:
        """The chunks whose media could be had, their features, and the failures of the others."""
        found: list[list[FeatureRows] | None] = []
        has_media = self._media.prepare(chunks)
        for chunk in chunks:
            try:
                found.append(self._media.rows_of(chunk))
            except Exception:
                logger.exception("the media of slot %d are lost", chunk.slot)
                found.append(None)
        is_lost = [rows is None for rows in found]
        if has_media:  # also keeps the slab as it is until every rank has read it
            is_lost = self._ranks.any_rank(is_lost)
        usable: list[Chunk] = []
        media_rows: list[list[FeatureRows]] = []
        failures: list[SlotFailure] = []
        for chunk, rows, lost in zip(chunks, found, is_lost, strict=True):
            if rows is None or lost:
                failures.append(SlotFailure(chunk.slot, "a picture or clip of the request could not be encoded"))
            else:
                usable.append(chunk)
                media_rows.append(rows)
        return usable, media_rows, failures

    def _place_media(self, chunks: list[Chunk], media_rows: list[list[FeatureRows]]) -> tuple[Tensor, Tensor] | None:
        """Rows of the flat token axis [n] int64 and the features [n, hidden] that replace their embeddings."""
        rows: list[Tensor] = []
        features: list[Tensor] = []
        first_row = 0
        for chunk, parts in zip(chunks, media_rows, strict=True):
            for part in parts:
                begin = first_row + part.first_row
                rows.append(torch.arange(begin, begin + part.features.shape[0]))
                features.append(part.features)
            first_row += chunk.num_tokens
        if not rows:
            return None
        return self._builder.to_device(torch.cat(rows)), torch.cat(features)
