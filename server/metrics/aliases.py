"""vLLM's names for our numbers, with the meaning that their readers expect: gateways, autoscalers, load tools, dashboards."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.metrics.snapshot import Snapshot

# Their name without prefix, our family, and the labels that choose among its series.
FAMILIES: Final[tuple[tuple[str, str, dict[str, str]], ...]] = (
    ("num_requests_running", "m3_sequences_running", {}),
    ("num_requests_waiting", "m3_sequences_waiting", {}),
    ("num_preemptions", "m3_preemptions", {}),
    ("prompt_tokens", "m3_prompt_tokens", {}),
    ("generation_tokens", "m3_generation_tokens", {}),
    ("prefix_cache_queries", "m3_prefix_query_tokens", {}),
    ("prefix_cache_hits", "m3_prefix_hit_tokens", {}),
    ("mm_cache_queries", "m3_media_feature_queries", {}),
    ("mm_cache_hits", "m3_media_feature_hits", {}),
    ("request_success", "m3_requests_ended", {}),
    ("time_to_first_token_seconds", "m3_time_to_first_token_seconds", {}),
    ("inter_token_latency_seconds", "m3_inter_token_seconds", {}),
    ("time_per_output_token_seconds", "m3_inter_token_seconds", {}),
    ("request_time_per_output_token_seconds", "m3_request_output_token_seconds", {}),
    ("e2e_request_latency_seconds", "m3_request_seconds", {}),
    ("request_queue_time_seconds", "m3_request_stage_seconds", {"stage": "queue"}),
    ("request_prefill_time_seconds", "m3_request_stage_seconds", {"stage": "prefill"}),
    ("request_decode_time_seconds", "m3_request_stage_seconds", {"stage": "decode"}),
    ("request_inference_time_seconds", "m3_request_inference_seconds", {}),
    ("request_prompt_tokens", "m3_request_prompt_tokens", {}),
    ("request_generation_tokens", "m3_request_output_tokens", {}),
    ("request_params_max_tokens", "m3_request_max_tokens", {}),
    ("request_params_n", "m3_request_choices", {}),
    ("iteration_tokens_total", "m3_engine_step_tokens", {}),
)
LABELS: Final = {"m3_requests_ended": {"reason": "finished_reason"}}
"""Their name of a label of ours."""


class AliasCollector(Collector):
    """Repeats the families of another registry under the other names."""

    def __init__(self, registry: CollectorRegistry, model_name: str, snapshot: Callable[[], Snapshot]) -> None:
        """Args: registry: has our families, and not this collector."""
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """The aliases of what there is."""
        ours = {family.name: family for family in self._registry.collect()}
        for name, source, chosen in FAMILIES:
            if source in ours:
                yield self._renamed(ours[source], f"vllm:{name}", chosen)
        yield from self._cache()

    def _renamed(self, source: Metric, name: str, chosen: dict[str, str]) -> Metric:
        alias = Metric(name, f"Alias of {source.name}.", source.type)
        labels = LABELS.get(source.name, {})
        for sample in source.samples:
            if chosen.items() <= sample.labels.items():
                kept = {labels.get(key, key): value for key, value in sample.labels.items() if key not in chosen}
                alias.add_sample(name + sample.name.removeprefix(source.name), self._labels | kept, sample.value)
        return alias

    def _cache(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        stats = snapshot.stats
        if not stats:
            return
        held = 1 - (stats["num_free_pages"] + stats["num_cached_pages"]) / stats["num_pages"]
        usage = Metric("vllm:kv_cache_usage_perc", "Share of the pages that sequences hold, 0 to 1.", "gauge")
        usage.add_sample(usage.name, self._labels, held)
        yield usage
        sizes = {"block_size": str(snapshot.page_size), "num_gpu_blocks": str(int(stats["num_pages"]))}
        info = Metric("vllm:cache_config_info", "Size of the cache; the value is always 1.", "gauge")
        info.add_sample(info.name, self._labels | sizes, 1)
        yield info
        sources = {
            "local_compute": stats["prompt_tokens_total"] - stats["prefix_hit_tokens_total"],
            "local_cache_hit": stats["prefix_hit_tokens_total"],
        }
        by_source = Metric("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "counter")
        for source, value in sources.items():
            by_source.add_sample(f"{by_source.name}_total", self._labels | {"source": source}, value)
        yield by_source
