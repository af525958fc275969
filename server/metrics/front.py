"""What the front counts while it serves: requests, their times and sizes."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from server.metrics import buckets

ABORTS: Final = ("client", "shutdown")
ENDS: Final = ("stop", "length", "abort", "error")
STAGES: Final = ("prepare", "queue", "prefill", "decode")


class FrontMetrics:
    """Counters and histograms. Each method is one thing that happened."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Declare all families in `registry`."""
        self._registry = registry
        self._requests = self._counter("m3_requests", "Requests for an answer by status; 499 is a client that left.", "status")
        aborted = self._counter("m3_requests_aborted", "Requests that ended before their answer was complete.", "reason")
        self._aborted = {reason: aborted.labels(reason) for reason in ABORTS}
        ended = self._counter("m3_requests_ended", "Requests that reached the engine by how they ended.", "reason")
        self._ended = {reason: ended.labels(reason) for reason in ENDS}
        self._choices = self._counter("m3_choices", "Finished choices by reason.", "finish_reason")
        self._media_errors = Counter("m3_media_errors", "Requests refused for a picture or clip.", registry=registry)
        self._first_token = self._histogram("m3_time_to_first_token_seconds", "Arrival to first token.", buckets.FIRST_TOKEN_S)
        self._inter_token = self._histogram("m3_inter_token_seconds", "Between tokens of a choice.", buckets.INTER_TOKEN_S)
        self._output_token = self._histogram(
            "m3_request_output_token_seconds", "Mean time between the tokens of a request.", buckets.INTER_TOKEN_S
        )
        self._duration = self._histogram("m3_request_seconds", "Arrival to end of an answered request.", buckets.REQUEST_S)
        self._inference = self._histogram(
            "m3_request_inference_seconds", "First step to last token of an answered request.", buckets.STAGE_S
        )
        stages = Histogram(
            "m3_request_stage_seconds",
            "Time of a request before the engine has it (prepare), until its first step (queue), until its first token"
            " (prefill) and until its last (decode).",
            ["stage"],
            buckets=buckets.STAGE_S,
            registry=registry,
        )
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._prompt = self._histogram("m3_request_prompt_tokens", "Prompt tokens of an answered request.", buckets.TOKENS)
        self._output = self._histogram("m3_request_output_tokens", "Output tokens of an answered request.", buckets.TOKENS)
        self._limit = self._histogram("m3_request_max_tokens", "Output tokens that a choice might have had.", buckets.TOKENS)
        self._num_choices = self._histogram("m3_request_choices", "Choices of an answered request.", buckets.CHOICES)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [label], registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=bounds, registry=self._registry)

    def request_ended(self, status: int) -> None:
        """A request for an answer ended, however it did and wherever it was."""
        self._requests.labels(str(status)).inc()

    def generation_ended(self, reason: str) -> None:
        """A request that had reached the engine ended; the reason is one of `ENDS`."""
        self._ended[reason].inc()

    def client_left(self) -> None:
        """A client left before its answer was complete."""
        self._aborted["client"].inc()

    def shut_down(self, num_requests: int) -> None:
        """The shutdown's deadline ended that many requests."""
        self._aborted["shutdown"].inc(num_requests)

    def choice_finished(self, reason: str) -> None:
        """A choice has its finish reason."""
        self._choices.labels(reason).inc()

    def media_refused(self) -> None:
        """A request was answered with a media error."""
        self._media_errors.inc()

    def first_token(self, prepare_s: float, queue_s: float, prefill_s: float) -> None:
        """A request's first token arrived; the sum of the three is the time since the request did."""
        self._first_token.observe(prepare_s + queue_s + prefill_s)
        for stage, duration_s in (("prepare", prepare_s), ("queue", queue_s), ("prefill", prefill_s)):
            self._stages[stage].observe(duration_s)

    def next_tokens(self, delay_s: float, num_tokens: int) -> None:
        """`num_tokens` more tokens of a choice arrived together, `delay_s` after the ones before."""
        for _ in range(num_tokens):
            self._inter_token.observe(delay_s / num_tokens)

    def answered(self, duration_s: float, inference_s: float, decode_s: float, num_tokens: int, num_choices: int) -> None:
        """A request was answered; `num_tokens` are the output of all choices, whose tokens came side by side."""
        self._duration.observe(duration_s)
        self._inference.observe(inference_s)
        self._stages["decode"].observe(decode_s)
        self._output.observe(num_tokens)
        self._num_choices.observe(num_choices)
        num_gaps = num_tokens / num_choices - 1
        if num_gaps > 0:
            self._output_token.observe(decode_s / num_gaps)

    def asked(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """What the request that was answered had asked for."""
        self._prompt.observe(num_prompt_tokens)
        self._limit.observe(max_tokens)
