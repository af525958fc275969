"""The engine's heartbeat in the words of the metrics."""

from server.heartbeat import STEP_BUCKETS_S, STEP_BUCKETS_TOKENS, Pulse
from server.metrics.snapshot import Distribution, EngineView


def engine_view(pulse: Pulse) -> EngineView:
    """What the metrics show of a heartbeat."""
    return EngineView(
        age_s=pulse.age_s,
        idle_seconds=pulse.idle_seconds,
        num_bytes_to_load=pulse.num_bytes_to_load,
        num_loaded_bytes=pulse.num_loaded_bytes,
        step_seconds=Distribution(STEP_BUCKETS_S, pulse.steps_by_time, pulse.step_seconds),
        step_tokens=Distribution(STEP_BUCKETS_TOKENS, pulse.steps_by_tokens, pulse.num_step_tokens),
    )
