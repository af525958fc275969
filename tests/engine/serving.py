"""Requests through the real scheduler, runner and model in one process, on NaN-poisoned pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from server.engine_steps import StepPipeline
from server.heartbeat import Heartbeat
from server.kvcache.pools import CachePools
from server.messages import Failed, Finished, RequestEvent, SlabRef, Submit, Tokens
from server.model.config import cache_spec
from server.model.decode_graphs import Recorder
from server.model.grammar import GrammarCompiler
from server.model.m3 import M3Model
from server.model.runner import ModelRunner
from server.scheduler.config import SchedulerConfig
from server.scheduler.scheduler import Scheduler


@dataclass
class Pixels:
    """A slab without shared memory; a reference's offset is the index of its picture."""

    pictures: list[np.ndarray] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    num_reads: int = 0

    def add(self, picture: np.ndarray) -> SlabRef:
        self.pictures.append(picture)
        return SlabRef(len(self.pictures) - 1, picture.size, 1)

    def read(self, ref: SlabRef) -> np.ndarray:
        self.num_reads += 1
        if ref.offset in self.broken:
            raise ValueError("the range was reused")
        return self.pictures[ref.offset].reshape(-1)


class Server:
    """An engine without process and socket."""

    def __init__(
        self,
        model: M3Model,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        num_pages: int = 128,
        enable_prefix_caching: bool = False,
        pixels: Pixels | None = None,
        grammars: GrammarCompiler | None = None,
        overlap_steps: bool = False,
        record: Recorder | None = None,
    ) -> None:
        spec = cache_spec(model.config, model.dtype)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=model.config.text.max_position_embeddings,
            page_size=spec.page_size,
            num_pages=num_pages,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.pools = CachePools(spec, num_pages, model.device)
        self.pools.poison(range(num_pages))
        self.scheduler = Scheduler(config)
        self.runner = ModelRunner(
            model,
            self.pools,
            max_num_seqs=max_num_seqs,
            max_model_len=config.max_seq_len,
            vocab_size=model.config.text.vocab_size,
            read_pixels=(pixels or Pixels()).read,
            base_seed=1,
            grammars=grammars,
            poison_pages=True,
        )
        if record is not None:
            self.runner.capture_graphs(record)
        self.steps = StepPipeline(self.scheduler, self.runner, self._record, Heartbeat(), overlap=overlap_steps)
        self.events: dict[str, list[RequestEvent]] = {}

    def submit(self, request: Submit) -> None:
        self._record(self.scheduler.add(request))

    def abort(self, request_id: str) -> None:
        self._record(self.scheduler.abort(request_id))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until nothing is left to do, or `until` says so."""
        while not until() and (self.scheduler.has_work or self.steps):
            self.steps.advance(self.scheduler.schedule())

    def serve(self, requests: Sequence[Submit]) -> dict[str, list[int]]:
        """All requests at once; the tokens of each. Every one must finish."""
        for request in requests:
            self.submit(request)
        self.run()
        return {request.request_id: self.output(request.request_id) for request in requests}

    def output(self, request_id: str) -> list[int]:
        """The tokens so far; a request that failed is an error."""
        failures = [event for event in self.events[request_id] if isinstance(event, Failed)]
        assert not failures, failures
        return [i for event in self.events[request_id] if isinstance(event, Tokens) for i in event.token_ids]

    def end(self, request_id: str) -> Finished | Failed:
        event = self.events[request_id][-1]
        assert isinstance(event, Finished | Failed)
        return event

    def _record(self, events: Sequence[RequestEvent]) -> None:
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)
