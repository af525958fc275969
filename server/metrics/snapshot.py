"""What a scrape shows of the rest of the server, as numbers of one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Distribution:
    """A histogram that somebody else counts.

    Attributes:
        bounds: upper bounds of the buckets.
        counts: per bucket, and beyond the last one.
        total: of all values.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


@dataclass(frozen=True)
class EngineView:
    """The engine, as its heartbeat shows it.

    Attributes:
        age_s: since the last sign of progress.
        idle_seconds: in which no step ran.
        num_bytes_to_load, num_loaded_bytes: of the weights.
        step_seconds, step_tokens: of all steps.
    """

    age_s: float
    idle_seconds: float
    num_bytes_to_load: int
    num_loaded_bytes: int
    step_seconds: Distribution
    step_tokens: Distribution


@dataclass(frozen=True)
class Snapshot:
    """The moment of a scrape.

    Attributes:
        state: where the server is in its life.
        states: all there are.
        num_requests: that hold a place, whatever they wait for.
        num_sequences: without a terminal event.
        num_queued_tokens: prompt tokens of requests without a first token.
        page_size: tokens per page; None before the engine is ready.
        lane_page_bytes: of a page, by lane; empty before.
        stats: the engine's latest statistics by field name; empty before the first.
        engine: None before the engine process exists.
        media: the media pipeline's statistics by field name.
    """

    state: str
    states: Sequence[str]
    num_requests: int
    num_sequences: int
    num_queued_tokens: int = 0
    page_size: int | None = None
    lane_page_bytes: Mapping[str, int] = field(default_factory=dict)
    stats: Mapping[str, float] = field(default_factory=dict)
    engine: EngineView | None = None
    media: Mapping[str, float] = field(default_factory=dict)
