"""Rows of the serving benchmark: percentiles per concurrency."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.serve_load import Level


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, interpolated between neighbours.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Spread:
    """Median and 99th percentile, milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> "Spread | None":
        """None without values."""
        if not values:
            return None
        return cls(round(percentile(values, 50) * 1e3, 3), round(percentile(values, 99) * 1e3, 3))


@dataclass(frozen=True)
class ServeRow:
    """One concurrency.

    Attributes:
        server: which program answered.
        concurrency: requests open at a time.
        num_requests: answered completely.
        num_errors: failed.
        prompt_tokens: mean per request, as the server counts; None when it does not say.
        output_tokens: mean per request.
        ttft_ms: until the first text.
        tpot_ms: per token behind the first, one value per request.
        itl_ms: between pieces of text, all requests together.
        output_tokens_per_s: of all requests together.
        requests_per_s: likewise.
        client_cpu: share of one core that the client took; near 1 it limits what is measured.
        first_error: of the failed requests.
    """

    server: str
    concurrency: int
    num_requests: int
    num_errors: int
    prompt_tokens: float | None
    output_tokens: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    output_tokens_per_s: float
    requests_per_s: float
    client_cpu: float
    first_error: str | None


def row_of(server: str, concurrency: int, level: Level) -> ServeRow:
    """The figures of a level."""
    answers = level.answers
    prompt_tokens = [answer.num_prompt_tokens for answer in answers if answer.num_prompt_tokens is not None]
    outputs = [answer.num_output_tokens for answer in answers]
    return ServeRow(
        server=server,
        concurrency=concurrency,
        num_requests=len(answers),
        num_errors=len(level.errors),
        prompt_tokens=round(mean(prompt_tokens), 1) if prompt_tokens else None,
        output_tokens=round(mean(outputs), 1) if outputs else None,
        ttft_ms=Spread.of_seconds([answer.ttft_s for answer in answers]),
        tpot_ms=Spread.of_seconds([tpot for answer in answers if (tpot := answer.tpot_s) is not None]),
        itl_ms=Spread.of_seconds([gap for answer in answers for gap in answer.gaps_s]),
        output_tokens_per_s=round(sum(outputs) / level.seconds, 1),
        requests_per_s=round(len(answers) / level.seconds, 2),
        client_cpu=round(level.client_cpu, 2),
        first_error=level.errors[0] if level.errors else None,
    )


HEADER = (
    f"{'server':14} {'conc':>5} {'reqs':>5} {'in':>7} {'out':>6} {'TTFT ms p50':>12} {'p99':>9} {'TPOT ms p50':>12} {'p99':>9} "
    f"{'ITL ms p50':>12} {'p99':>9} {'out tok/s':>10} {'client':>7} errors"
)


def format_row(row: ServeRow) -> str:
    """One line of the table."""

    def pair(spread: Spread | None) -> str:
        return f"{spread.p50:12.2f} {spread.p99:9.2f}" if spread else f"{'-':>12} {'-':>9}"

    counts = f"{row.concurrency:5d} {row.num_requests:5d} {row.prompt_tokens or 0:7.0f} {row.output_tokens or 0:6.0f}"
    errors = f"{row.num_errors}: {row.first_error}" if row.num_errors else "0"
    return (
        f"{row.server:14} {counts} {pair(row.ttft_ms)} {pair(row.tpot_ms)} {pair(row.itl_ms)} "
        f"{row.output_tokens_per_s:10.1f} {row.client_cpu:7.2f} {errors}"
    )
