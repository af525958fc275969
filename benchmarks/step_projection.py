"""What one step of all 60 layers on several GPUs would take, from measured parts of one rank: a projection, and called so.

`dense layers + sparse layers + two sums over ranks per layer + rest of the model + logits + sampling + idle time`. A sum is
what it takes beyond the norm in the same launch, which the layers have. The sums were measured between fewer GPUs than the
projection speaks of, so they are a lower bound; gathering the logits is left out.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.all_reduce import Sums
from benchmarks.step_report import StepRow

NUM_DENSE, NUM_SPARSE = 3, 57
GOALS_US = {(4, 1024, "mxfp8"): 4500.0, (64, 1024, "mxfp8"): 15000.0}


def projections(rows: Sequence[StepRow], all_reduce: Sequence[Path]) -> Iterator[StepRow]:
    """A row for every decode step of which all parts were measured, and for all measurements of sums."""
    for sums, step in itertools.product(map(Sums, all_reduce), rows):
        if step.part == "decode" and step.what == "slice" and step.us is not None:
            parts = _parts_us(rows, step, sums)
            if parts is not None:
                yield StepRow(
                    part="tpot",
                    what=f"60 layers, sums of {sums.num_gpus} GPUs",
                    dtype=step.dtype,
                    shard=step.shard,
                    batch=step.batch,
                    context=step.context,
                    us=round(sum(parts.values()), 1),
                    goal_us=GOALS_US.get((step.batch or 0, step.context or 0, step.dtype)) if step.shard == 8 else None,
                    parts_us={name: round(us, 1) for name, us in parts.items()},
                    mode="projection",
                )


def _parts_us(rows: Sequence[StepRow], step: StepRow, sums: Sums) -> dict[str, float] | None:
    def measured(part: str, what: str, context: int | None) -> StepRow | None:
        wanted = (part, what, step.dtype, step.shard, step.batch, context)
        found = [r for r in rows if (r.part, r.what, r.dtype, r.shard, r.batch, r.context) == wanted and r.us is not None]
        return found[0] if found else None

    sparse = measured("decode", "sparse layer", step.context)
    dense = measured("decode", "dense layer", step.context)
    logits, sampling = measured("head", "logits", None), measured("head", "sampling, greedy", None)
    if not (sparse and dense and logits and sampling and step.layers):
        return None
    num_dense, num_sparse = (int(word) for word in step.layers.split() if word.isdigit())
    dense_us, sparse_us = dense.us_per_layer or 0.0, sparse.us_per_layer or 0.0
    rest_us = max(0.0, (step.us or 0.0) - num_dense * dense_us - num_sparse * sparse_us)
    sums_us = 2 * (NUM_DENSE + NUM_SPARSE) * sums.us(step.batch or 1) if step.shard > 1 else 0.0
    return {
        "dense layers": NUM_DENSE * dense_us,
        "sparse layers": NUM_SPARSE * sparse_us,
        "sums over ranks": sums_us,
        "rest of the model": rest_us,
        "logits": logits.us or 0.0,
        "sampling": sampling.us or 0.0,
    }
