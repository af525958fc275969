"""What follows the layers, per batch size: the logits, and the choice of a token by rows that sample alike."""

from collections.abc import Iterator, Sequence

import torch

from benchmarks.slices import Layers
from benchmarks.step_parts import Bench, time_decode, time_sampling
from benchmarks.step_report import StepRow
from benchmarks.timing import limit_us
from server.messages import SamplingParams
from server.model.pending_sample import PendingSample
from server.model.sampler import Sampler
from server.model.sampling_slot import SamplingRow
from server.scheduler.plan import NewSequence

KINDS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "top-p 0.95": SamplingParams(max_tokens=1, temperature=1.0, top_p=0.95),
    "top-k 40, top-p 0.95": SamplingParams(max_tokens=1, temperature=1.0, top_p=0.95, top_k=40),
}


def head_rows(bench: Bench, batches: Sequence[int]) -> Iterator[StepRow]:
    """Logits and sampling of every batch size."""
    for batch_size in batches:
        try:
            yield _logits_row(bench, batch_size)
        except Exception as error:
            yield bench.failed("head", "logits", error, batch=batch_size)
        for kind, params in KINDS.items():
            try:
                yield _sampling_row(bench, batch_size, kind, params)
            except Exception as error:
                yield bench.failed("head", f"sampling, {kind}", error, batch=batch_size)


def _logits_row(bench: Bench, batch_size: int) -> StepRow:
    model, head = bench.whole.model(Layers(1, 0)), bench.whole.weights["lm_head"]
    hidden = torch.randn((batch_size, head.shape[1]), dtype=model.dtype, device=model.device)
    timing, mode = time_decode(lambda: model.logits(hidden), bench.use_graphs)
    limit = limit_us(head.numel() * head.itemsize, 2.0 * head.numel() * batch_size)
    return bench.row("head", "logits", timing, limit, 1, mode, batch=batch_size)


def _sampling_row(bench: Bench, batch_size: int, kind: str, params: SamplingParams) -> StepRow:
    """The limit is one read of the logits."""
    vocab_size, device, dtype = bench.whole.config.text.vocab_size, bench.pools.device, bench.whole.weights["lm_head"].dtype
    sampler = Sampler(batch_size, vocab_size, device, base_seed=0)
    for slot in range(batch_size):
        sampler.admit(NewSequence(slot, f"request {slot}", [0], 1, params, ()))
    logits = torch.randn((batch_size, vocab_size), dtype=dtype, device=device) * 3.0
    rows = [SamplingRow(slot, 1) for slot in range(batch_size)]
    pending: list[PendingSample] = []

    def choose() -> None:
        if pending:
            pending.pop().wait()  # of the call before, whose work is done
        pending.append(sampler.launch(logits, rows))

    timing, mode = time_sampling(choose)
    return bench.row("head", f"sampling, {kind}", timing, limit_us(logits.nbytes, 0), 1, mode, batch=batch_size)
