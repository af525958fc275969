"""`m3-server plan`: the released model on the GPUs it is served on, and plans that cannot be."""

import json
import re
from pathlib import Path

import pytest

from server.cli import main
from server.model.config import RELEASED_DIR


def plan(capsys, *arguments, code=0):
    assert main(["plan", *arguments]) == code
    return capsys.readouterr()


def plan_json(capsys, *arguments, code=0):
    return json.loads(plan(capsys, *arguments, "--json", code=code).out)


def test_the_released_model_on_eight_gpus(capsys):
    answer = plan_json(capsys, "--gpus", "8", "--gpu-memory", "139")
    assert answer["weights_total_bytes"] == 854_172_958_720
    assert answer["page"] == {
        "num_tokens": 128,
        "num_bytes": 128 * 45_312,
        "dense_bytes": 128 * 3 * 512,
        "index_bytes": 128 * 14_592,
        "sparse_bytes": 128 * 57 * 512,
    }
    gpu = answer["gpu"]
    held = sum(gpu[f"{what}_bytes"] for what in ("kept", "taken", "weights", "workspaces", "graphs", "features"))
    assert gpu["left_bytes"] == gpu["total_bytes"] - held
    assert answer["num_pages"] == gpu["left_bytes"] // answer["page"]["num_bytes"]
    assert answer["context"] == answer["num_tokens"] == answer["num_pages"] * 128
    for row in answer["contexts"]:
        assert row["on_gpu"] == answer["num_pages"] // -(-row["context"] // 128)
        assert row["on_gpu"] <= row["sparse_on_host"] <= row["idle"]


def test_the_released_model_in_mxfp8_on_four_gpus(capsys):
    answer = plan_json(capsys, "--gpus", "4", "--gpu-memory", "139", "--dtype", "mxfp8")
    assert (answer["dtype"], answer["weights_total_bytes"]) == ("mxfp8", 443_742_085_120)
    assert answer["num_tokens"] > 131_072
    assert "MXFP8" not in plan(capsys, "--gpus", "2", "--gpu-memory", "139", "--dtype", "mxfp8", code=1).err
    assert "MXFP8" in plan(capsys, "--gpus", "4", "--gpu-memory", "139", "--dtype", "bf16", code=1).err


def test_host_memory_bounds_the_sequences_that_use_it(capsys):
    arguments = ("--gpus", "8", "--gpu-memory", "139")
    free = plan_json(capsys, *arguments)["contexts"][-2]
    host_gib = 2 * free["host_bytes"] / (1 << 30)
    bounded = plan_json(capsys, *arguments, "--host-memory", str(host_gib))["contexts"][-2]
    assert free["idle"] > bounded["idle"] == 2
    assert bounded["on_gpu"] == free["on_gpu"]


def test_the_contexts_end_with_the_one_asked_for(capsys):
    rows = plan_json(capsys, "--gpus", "16", "--gpu-memory", "139", "--context", "200000")["contexts"]
    assert [row["context"] for row in rows] == [8_192, 32_768, 131_072, 200_000]
    rows = plan_json(capsys, "--gpus", "16", "--gpu-memory", "139")["contexts"]
    assert [row["context"] for row in rows] == [8_192, 32_768, 131_072, 524_288, 1_048_576]


@pytest.mark.parametrize(("dtype", "gpus"), [("bf16", "8"), ("mxfp8", "4"), ("mxfp8", "8")])
def test_the_sizing_table_of_the_deployment_guide_is_what_the_command_says(dtype, gpus, capsys):
    answer = plan_json(capsys, "--gpus", gpus, "--gpu-memory", "139", "--dtype", dtype)
    name = {"bf16": "bf16", "mxfp8": "MXFP8"}[dtype]
    cells = [f"{name} on {gpus}", *(f"{answer['gpu'][key] / 2**30:.1f} GiB" for key in ("weights_bytes", "left_bytes"))]
    cells += [f"{answer['num_tokens']:,}", *(f"{row['on_gpu']} / {row['sparse_on_host']}" for row in answer["contexts"])]
    row = f"| {' | '.join(cells)} |"
    assert row in (Path(__file__).parents[1] / "deploy" / "README.md").read_text(), row


def test_the_report_is_for_people(capsys):
    text = plan(capsys, "--gpus", "8", "--gpu-memory", "139", "--host-memory", "1024").out
    assert "M3, bf16, 795.51 GiB of weights, on 8 GPUs of 139 GiB" in text
    for line in ("left for the cache", "1024 GiB of host memory", "Dense K/V never leave the GPU", "131,072"):
        assert line in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gpus", "4", "--gpu-memory", "139"], "GiB of memory are missing"),
        (["--gpus", "8", "--gpu-memory", "139", "--context", "1048576"], r"max_model_len \d+ or less"),
        (["--gpus", "8", "--gpu-memory", "139", "--context", "2000000"], "window has 1,048,576"),
        (["--gpus", "3", "--gpu-memory", "500"], "cannot be cut for 3 ranks"),
        (["--model", "/nowhere", "--gpus", "1", "--gpu-memory", "1"], "config.json cannot be read"),
    ],
)
def test_an_impossible_plan_says_why(arguments, reason, capsys):
    assert re.search(reason, plan(capsys, *arguments, code=1).err)
    answer = plan_json(capsys, *arguments, code=1)
    assert answer["fits"] is False
    assert re.search(reason, answer["reason"])
    assert (answer["missing_bytes"] is not None) == ("GiB of memory are missing" in answer["reason"])


def test_what_is_missing_is_what_more_memory_must_bring(capsys):
    missing_bytes = plan_json(capsys, "--gpus", "4", "--gpu-memory", "200", "--gpu-memory-utilization", "1", code=1)[
        "missing_bytes"
    ]
    for spare_bytes, code in ((1, 0), (-1, 1)):
        gib = str(200 + (missing_bytes + spare_bytes) / 2**30)
        plan(capsys, "--gpus", "4", "--gpu-memory", gib, "--gpu-memory-utilization", "1", code=code)


def test_a_folder_is_read_like_the_released_model(capsys):
    assert plan_json(capsys, "--model", str(RELEASED_DIR), "--gpus", "8", "--gpu-memory", "139") == plan_json(
        capsys, "--gpus", "8", "--gpu-memory", "139"
    )


@pytest.mark.parametrize(
    "arguments",
    [["--gpus", "0"], ["--gpu-memory", "-1"], ["--gpu-memory", "nan"], ["--gpu-memory-utilization", "1.5"], ["--gpu", "1"]],
)
def test_wrong_flags_are_answered(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--gpus", "8", "--gpu-memory", "139", *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
