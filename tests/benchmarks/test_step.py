import json
import sys

import pytest

from benchmarks import step
from benchmarks.step_loop import union_us, with_idle
from benchmarks.step_projection import projections
from benchmarks.step_report import StepRow

TINY = "server/model/tiny/config.json"
SMALL = (
    "--device cpu --layers 1+2 --batches 1,3 --contexts 256 --chunks 0:130,130:40 --prompt 256 --prompt-chunk 128 "
    "--loop-batches 2 --loop-context 140 --loop-tokens 16 --pool-bytes 4000000"
)


@pytest.fixture
def run(tmp_path, request, monkeypatch):
    """Runs the benchmark on the CPU with tiny widths; the rows in its file."""
    out = tmp_path / "step.json"

    def run(options):
        config = request.config.rootpath / TINY
        monkeypatch.setattr(sys, "argv", ["step", *SMALL.split(), "--config", str(config), "--out", str(out), *options.split()])
        step.main()
        return json.loads(out.read_text())

    return run


def names(result):
    return [(row["part"], row["what"], row["dtype"]) for row in result["rows"]]


@pytest.mark.parametrize("dtype", ["fp32", "mxfp8"])
def test_every_part_runs(run, dtype):
    result = run(f"--dtypes {dtype}")
    assert not [row for row in result["rows"] if "error" in row]
    name = {"fp32": "float32"}.get(dtype, dtype)
    assert {(row["part"], row["dtype"]) for row in result["rows"]} == {(part, name) for part in step.PARTS}
    decode = [row for row in result["rows"] if (row["part"], row["what"]) == ("decode", "slice")]
    assert [(row["batch"], row["context"]) for row in decode] == [(1, 256), (3, 256)]
    for row in decode:
        assert row["us_per_layer"] == pytest.approx(row["us"] / 3, abs=0.01)
        assert row["x_limit"] == pytest.approx(row["us_per_layer"] / row["limit_us_per_layer"], rel=0.02)
        assert 2 <= row["distinct_experts"] <= 6
    assert all(row["cpu_us"] > 0 for row in result["rows"] if row["part"] == "loop")
    assert not any("idle_between_steps" in row for row in result["rows"])  # at another context


def test_parts_that_are_not_measured_again_stay(run):
    run("--dtypes fp32 --only head")
    first = names(run("--dtypes fp32 --only head"))
    both = names(run("--dtypes fp32 --only decode"))
    assert both[: len(first)] == first
    assert set(both) - set(first) == {("decode", what, "float32") for what in ("slice", "sparse layer", "dense layer")}


def test_what_cannot_run_says_why_and_costs_no_other_row(run):
    rows = run("--dtypes fp32 --only prefill --chunks 0:64,1048576:64")["rows"]
    assert [row["what"] for row in rows if "error" not in row] == ["slice", "sparse layer", "dense layer"]
    (failed,) = [row for row in rows if "error" in row]
    assert "do not fit a pool" in failed["error"]
    assert failed["context"] == 1048640


def test_overlapping_spans_count_once():
    assert union_us([(0, 2), (5, 6), (1, 3), (5.5, 5.6)]) == 4
    assert union_us([]) == 0


def test_what_the_parts_of_a_step_leave_over_is_idle():
    def row(part, what, us, batch=8, context=None):
        return StepRow(part, what, "mxfp8", batch=batch, context=context, us=us)

    parts = [
        row("decode", "slice", 700.0, context=8192),
        row("decode", "slice", 900.0, context=1024),
        row("head", "logits", 200.0),
        row("head", "logits", 250.0, batch=1),
        row("head", "sampling, greedy", 50.0),
    ]
    step = row("loop", "step, plain", 1000.0, context=8192)
    assert with_idle(step, parts).idle_between_steps == pytest.approx(0.05)
    assert with_idle(step, parts[1:]).idle_between_steps is None


def test_a_projection_is_the_sum_of_its_parts(tmp_path):
    def row(part, what, us, per_layer=None, context=1024):
        layers = "1 dense + 12 sparse"
        return StepRow(part, what, "mxfp8", 8, 4, context, layers=layers, us=us, us_per_layer=per_layer)

    rows = [
        row("decode", "slice", 700.0),
        row("decode", "sparse layer", 300.0, 50.0),
        row("decode", "dense layer", 80.0, 80.0),
        row("head", "logits", 600.0, context=None),
        row("head", "sampling, greedy", 20.0, context=None),
    ]
    sums = tmp_path / "sums.json"
    sums.write_text(
        json.dumps(
            {
                "num_gpus": 2,
                "rows": [
                    {"num_tokens": num_tokens, "us": us, "what": what}
                    for num_tokens, us, what in [
                        *[(1, 5, "server"), (4, 6, "NCCL"), (4, 9, "server"), (8, 11, "server")],
                        *[(1, 1, "norm alone"), (4, 2, "norm alone"), (8, 3, "norm alone")],
                    ]
                ],
            }
        )
    )
    (projected,) = projections(rows, [sums])
    assert projected.us == 3 * 80 + 57 * 50 + 120 * 7 + 20 + 600 + 20
    assert (projected.what, projected.mode, projected.goal_us) == ("60 layers, sums of 2 GPUs", "projection", 4500.0)
    assert not list(projections(rows[:-1], [sums]))
