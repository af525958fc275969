"""The model runner: carries out a step plan on one device and says what came of it.

It applies the plan's differences to the slots, builds the batch, runs the model and samples. A fault of one sequence (media,
non-finite logits) becomes a `SlotFailure` and leaves the others alone; anything else raises. It decides nothing about
requests or pages.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch
from server.kvcache.pools import CachePools
from server.model.batch_builder import BatchBuilder
from server.model.grammar import GrammarCompiler
from server.model.media_features import FeatureRows, MediaEncoder, MediaFeatures, PixelReader
from server.model.prompt_logprobs import PromptScorer
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
        """[S, vocab] fp32."""


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
        """
        self._model = model
        self._pools = pools
        self._poison_pages = poison_pages
        self._builder = BatchBuilder(max_num_seqs, max_model_len, pools.page_size, pools.device)
        self._media = MediaFeatures(model, read_pixels, pools.device, feature_cache_bytes)
        self._scorer = PromptScorer(pools.device)
        self._sampler = Sampler(max_num_seqs, vocab_size, pools.device, base_seed, grammars)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises whatever the model raises; then every sequence of the plan is lost, and no other."""
        self._take_over(plan)
        result = self._run(plan.chunks)
        for failure in result.failures:
            self._media.forget(failure.slot)
        return result

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
            self._sampler.admit(sequence)
        fresh_pages = self._builder.append_pages(plan.chunks)
        if self._poison_pages:
            self._pools.poison(fresh_pages)

    def _run(self, planned: tuple[Chunk, ...]) -> StepResult:
        chunks, media_rows, failures = self._collect_media(planned)
        if not chunks:
            return StepResult((), tuple(failures))
        model_input = self._builder.build(chunks)
        embeddings = self._place_media(chunks, media_rows)
        hidden = self._model.forward(model_input.token_ids, model_input.batch, self._pools, embeddings)
        scores, unscored = self._scorer.score(chunks, hidden, self._model.logits)
        failures += unscored
        rows = [SamplingRow(chunk.slot, chunk.start + chunk.num_tokens) for chunk in chunks if chunk.samples]
        if not rows:
            return StepResult((), tuple(failures), tuple(scores))
        pending = self._sampler.launch(self._model.logits(hidden[model_input.sample_rows]), rows)
        self._builder.set_last_tokens([row.slot for row in rows], pending.token_ids)
        sampled, faults = pending.wait()
        return StepResult(sampled, (*failures, *faults), tuple(scores))

    def _collect_media(self, chunks: tuple[Chunk, ...]) -> tuple[list[Chunk], list[list[FeatureRows]], list[SlotFailure]]:
        """The chunks whose media could be had, their features, and the failures of the others."""
        usable: list[Chunk] = []
        media_rows: list[list[FeatureRows]] = []
        failures: list[SlotFailure] = []
        self._media.prepare(chunks)
        for chunk in chunks:
            try:
                rows = self._media.rows_of(chunk)
            except Exception:
                logger.exception("the media of slot %d cannot be encoded", chunk.slot)
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
        return torch.cat(rows).to(self._pools.device, non_blocking=True), torch.cat(features)
