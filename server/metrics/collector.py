"""Families that are made at the moment of a scrape, from the numbers that engine, media pipeline and front keep anyway."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.metrics.snapshot import Distribution, EngineView, Snapshot

# Name of the family, name of the statistic, help.
ENGINE_GAUGES: Final = (
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
ENGINE_COUNTERS: Final = (
    ("m3_engine_steps", "steps_total", "Steps of the model."),
    ("m3_prompt_tokens", "prompt_tokens_total", "Prompt tokens computed or found in the cache."),
    ("m3_generation_tokens", "generation_tokens_total", "Generated tokens."),
    ("m3_preemptions", "preemptions_total", "Sequences that gave their pages up and were computed again."),
    ("m3_prefix_query_tokens", "prefix_query_tokens_total", "Prompt tokens looked up in the prefix cache."),
    ("m3_prefix_hit_tokens", "prefix_hit_tokens_total", "Prompt tokens found there."),
    (
        "m3_media_feature_queries",
        "feature_queries_total",
        "Pictures and parts of clips looked up among those that are encoded already.",
    ),
    ("m3_media_feature_hits", "feature_hits_total", "Pictures and parts of clips found there."),
)
MEDIA_GAUGES: Final = (
    ("m3_media_workers", "num_workers", "Decoder processes that are ready."),
    ("m3_media_tasks_queued", "num_queued", "Tasks that wait for a decoder."),
    ("m3_media_requests_waiting", "num_waiting", "Requests that wait for room in the slab."),
    ("m3_media_slab_bytes", "slab_bytes", "Shared memory for decoded pictures and frames."),
    ("m3_media_slab_free_bytes", "slab_free_bytes", "What of it is free."),
)
MEDIA_COUNTERS: Final = (
    ("m3_media_frames", "frames_total", "Frames of the clips."),
    ("m3_media_encoded_bytes", "encoded_bytes_total", "Encoded size of pictures and clips that were decoded."),
    ("m3_media_fetches", "fetches_total", "Downloads, also failed ones."),
    ("m3_media_fetched_bytes", "fetched_bytes_total", "Bytes downloaded."),
    ("m3_media_fetch_seconds", "fetch_seconds_total", "Time of downloads."),
    ("m3_media_tasks", "tasks_total", "Tasks that decoders answered or were killed over."),
    ("m3_media_queue_seconds", "queue_seconds_total", "Time that tasks waited for a decoder."),
    ("m3_media_decode_seconds", "worker_seconds_total", "Time that decoders were busy."),
    ("m3_media_decode_cpu_seconds", "decode_cpu_seconds_total", "Processor time of that."),
    ("m3_media_worker_deaths", "worker_deaths_total", "Decoders that died of a task or passed its deadline."),
    ("m3_media_worker_starts", "worker_starts_total", "Decoders started, replacements included."),
)
# Every page is in the GPU's memory, in all of its lanes.
TIER: Final = "gpu"


class SnapshotCollector(Collector):
    """Turns the snapshot of the moment into families; those of a silent engine are left out rather than zero."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """All families."""
        snapshot = self._snapshot()
        yield from _server(snapshot)
        if snapshot.engine is not None:
            yield from _engine(snapshot.engine)
        if snapshot.stats:
            yield from _gauges(ENGINE_GAUGES, snapshot.stats)
            yield from _counters(ENGINE_COUNTERS, snapshot.stats)
            yield from _lanes(snapshot)
        if snapshot.media:
            yield from _media(snapshot)


def held_pages(snapshot: Snapshot) -> float:
    """Pages that sequences hold."""
    stats = snapshot.stats
    return stats["num_pages"] - stats["num_free_pages"] - stats["num_cached_pages"]


def _gauges(table: Iterable[tuple[str, str, str]], stats: Mapping[str, float]) -> Iterator[Metric]:
    for name, statistic, text in table:
        yield GaugeMetricFamily(name, text, stats[statistic])


def _counters(table: Iterable[tuple[str, str, str]], stats: Mapping[str, float]) -> Iterator[Metric]:
    for name, statistic, text in table:
        yield CounterMetricFamily(name, text, stats[statistic])


def _server(snapshot: Snapshot) -> Iterator[Metric]:
    state = GaugeMetricFamily("m3_server_state", "1 for the state that the server is in.", labels=["state"])
    for name in snapshot.states:
        state.add_metric([name], float(name == snapshot.state))
    yield state
    yield GaugeMetricFamily("m3_engine_up", "1 while requests are taken.", float(snapshot.state == "ready"))
    yield GaugeMetricFamily("m3_requests_open", "Requests that hold a place.", snapshot.num_requests)
    yield GaugeMetricFamily("m3_sequences_open", "Sequences without a terminal event.", snapshot.num_sequences)
    yield GaugeMetricFamily(
        "m3_queued_prompt_tokens", "Prompt tokens of requests without a first token.", snapshot.num_queued_tokens
    )


def _engine(engine: EngineView) -> Iterator[Metric]:
    yield GaugeMetricFamily("m3_weights_bytes", "Size of the weights; 0 before it is known.", engine.num_bytes_to_load)
    yield GaugeMetricFamily("m3_weights_loaded_bytes", "What of it is read.", engine.num_loaded_bytes)
    yield GaugeMetricFamily(
        "m3_engine_heartbeat_age_seconds", "Time since a step ended or the idle engine looked around.", engine.age_s
    )
    yield CounterMetricFamily("m3_engine_idle_seconds", "Time in which no step ran.", engine.idle_seconds)
    yield _histogram("m3_engine_step_seconds", "Duration of a step, without what it waited.", engine.step_seconds)
    yield _histogram("m3_engine_step_tokens", "Tokens computed in a step.", engine.step_tokens)


def _histogram(name: str, text: str, values: Distribution) -> Metric:
    bounds = [*map(floatToGoString, values.bounds), "+Inf"]
    return HistogramMetricFamily(name, text, list(zip(bounds, accumulate(values.counts), strict=True)), values.total)


def _lanes(snapshot: Snapshot) -> Iterator[Metric]:
    sizes = (
        ("m3_cache_bytes", "Size of a lane of the cache in a tier of memory.", snapshot.stats["num_pages"]),
        ("m3_cache_held_bytes", "What of it sequences hold.", held_pages(snapshot)),
    )
    for name, text, num_pages in sizes:
        family = GaugeMetricFamily(name, text, labels=["lane", "tier"])
        for lane, num_bytes in snapshot.lane_page_bytes.items():
            family.add_metric([lane, TIER], num_pages * num_bytes)
        yield family


def _media(snapshot: Snapshot) -> Iterator[Metric]:
    items = CounterMetricFamily("m3_media_items", "Pictures and clips decoded.", labels=["kind"])
    items.add_metric(["image"], snapshot.media["pictures_total"])
    items.add_metric(["video"], snapshot.media["clips_total"])
    yield items
    yield from _gauges(MEDIA_GAUGES, snapshot.media)
    yield from _counters(MEDIA_COUNTERS, snapshot.media)
