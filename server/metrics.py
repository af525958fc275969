"""All metric families, declared once. Imports nothing of ours: the rest of the server hands in numbers.

The names start with `m3_`. Four gauges are repeated under the names that Kubernetes' inference gateways read
(`vllm:num_requests_running` and so on), with the same meaning. Every application has its own registry.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# A time of creation beside every counter doubles the page, and nobody reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
INTER_TOKEN_BUCKETS_S: Final = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
REQUEST_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


@dataclass(frozen=True)
class EngineSnapshot:
    """What a scrape shows of the engine.

    Attributes:
        is_up: whether it takes requests.
        num_open: sequences without a terminal event.
        page_size: tokens per page, once known.
        stats: the engine's latest statistics by field name; empty before the first.
        num_queued_tokens: prompt tokens of requests without a first token.
    """

    is_up: bool
    num_open: int
    page_size: int | None
    stats: Mapping[str, float]
    num_queued_tokens: int = 0


# Name of the family, name of the statistic, help.
GAUGES: Final = (
    ("m3_sequences_running", "num_running", "Sequences that hold a slot."),
    ("m3_sequences_waiting", "num_waiting", "Sequences that wait for a slot or for pages."),
    ("m3_cache_pages", "num_pages", "Pages in the cache."),
    ("m3_cache_free_pages", "num_free_pages", "Pages without holder and without contents."),
    (
        "m3_cache_cached_pages",
        "num_cached_pages",
        "Pages without holder that a prefix can still hit; they are taken when no page is free.",
    ),
)
COUNTERS: Final = (
    ("m3_engine_steps", "steps_total", "Steps of the model."),
    ("m3_prompt_tokens", "prompt_tokens_total", "Prompt tokens computed or found in the cache."),
    ("m3_generation_tokens", "generation_tokens_total", "Generated tokens."),
    ("m3_preemptions", "preemptions_total", "Sequences that gave their pages up and were computed again."),
    ("m3_prefix_query_tokens", "prefix_query_tokens_total", "Prompt tokens looked up in the prefix cache."),
    ("m3_prefix_hit_tokens", "prefix_hit_tokens_total", "Prompt tokens found there."),
)


class EngineCollector(Collector):
    """Turns the engine's latest statistics into families at the moment of a scrape."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._model_name = model_name
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """All families; those of a silent engine are left out rather than zero."""
        snapshot = self._snapshot()
        yield GaugeMetricFamily("m3_engine_up", "1 while the engine takes requests.", float(snapshot.is_up))
        yield GaugeMetricFamily("m3_sequences_open", "Sequences without a terminal event.", snapshot.num_open)
        yield GaugeMetricFamily(
            "m3_queued_prompt_tokens", "Prompt tokens of requests without a first token.", snapshot.num_queued_tokens
        )
        if not snapshot.stats:
            return
        for name, statistic, text in GAUGES:
            yield GaugeMetricFamily(name, text, snapshot.stats[statistic])
        for name, statistic, text in COUNTERS:
            yield CounterMetricFamily(name, text, snapshot.stats[statistic])
        yield from self._aliases(snapshot)

    def _aliases(self, snapshot: EngineSnapshot) -> Iterable[Metric]:
        stats = snapshot.stats
        held = 1 - (stats["num_free_pages"] + stats["num_cached_pages"]) / stats["num_pages"]
        for name, text, value in (
            ("vllm:num_requests_running", "Alias of m3_sequences_running.", stats["num_running"]),
            ("vllm:num_requests_waiting", "Alias of m3_sequences_waiting.", stats["num_waiting"]),
            ("vllm:kv_cache_usage_perc", "Share of the pages that sequences hold.", held),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        info = GaugeMetricFamily("vllm:cache_config_info", "Size of the cache; the value is always 1.", labels=labels)
        info.add_metric([self._model_name, str(snapshot.page_size), str(int(stats["num_pages"]))], 1)
        yield info


class Metrics:
    """What the front counts itself, and the registry that `/metrics` shows."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, snapshot))
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "m3_requests", "Requests for an answer by status; 499 is a client that left.", ["status"], registry=self.registry
        )
        aborted = Counter(
            "m3_requests_aborted", "Requests that ended before their answer was complete.", ["reason"], registry=self.registry
        )
        self._aborted = {reason: aborted.labels(reason) for reason in ("client", "shutdown")}
        self._choices = Counter("m3_choices", "Finished choices by reason.", ["finish_reason"], registry=self.registry)
        self._media_items = Counter("m3_media_items", "Pictures and clips decoded.", registry=self.registry)
        self._media_errors = Counter("m3_media_errors", "Requests refused for a picture or clip.", registry=self.registry)
        self._first_token = self._histogram("m3_time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS_S)
        self._inter_token = self._histogram("m3_inter_token_seconds", "Between tokens of a choice.", INTER_TOKEN_BUCKETS_S)
        self._duration = self._histogram("m3_request_seconds", "Arrival to end of a request.", REQUEST_BUCKETS_S)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def request_ended(self, status: int, duration_s: float) -> None:
        """A request ended, however it did."""
        self._requests.labels(str(status)).inc()
        self._duration.observe(duration_s)

    def client_left(self) -> None:
        """A client left before its answer was complete."""
        self._aborted["client"].inc()

    def shut_down(self, num_requests: int) -> None:
        """The shutdown's deadline ended that many requests."""
        self._aborted["shutdown"].inc(num_requests)

    def choice_finished(self, reason: str) -> None:
        """A choice has its finish reason."""
        self._choices.labels(reason).inc()

    def first_token(self, delay_s: float) -> None:
        """A request's first token arrived."""
        self._first_token.observe(delay_s)

    def next_tokens(self, delay_s: float, num_tokens: int) -> None:
        """`num_tokens` more tokens of a choice arrived together, `delay_s` after the ones before."""
        for _ in range(num_tokens):
            self._inter_token.observe(delay_s / num_tokens)

    def media_loaded(self, num_items: int) -> None:
        """Pictures and clips lie decoded in the slab."""
        self._media_items.inc(num_items)

    def media_refused(self) -> None:
        """A request was answered with a media error."""
        self._media_errors.inc()

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)
