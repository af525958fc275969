"""The registry that `/metrics` shows: what the front counts, what a scrape looks up, and the same under other names."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest

from server.metrics.aliases import AliasCollector
from server.metrics.collector import SnapshotCollector
from server.metrics.front import FrontMetrics
from server.metrics.snapshot import Snapshot

# A time of creation beside every counter doubles the page, and nobody reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All families of one application.

    Attributes:
        front: what the front counts itself.
        registry: our own families.
    """

    def __init__(self, model_name: str, snapshot: Callable[[], Snapshot]) -> None:
        """`snapshot` is asked at every scrape, from whatever thread."""
        self.registry = CollectorRegistry()
        self.front = FrontMetrics(self.registry)
        self.registry.register(SnapshotCollector(snapshot))
        ProcessCollector(registry=self.registry)
        self._aliases = CollectorRegistry()
        self._aliases.register(AliasCollector(self.registry, model_name, snapshot))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(self._aliases)
