import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MATRIX_KERNELS = ["_score_hopper_kernel", "_page_attention_kernel", "_page_major_hopper_kernel"]
SHARED_BYTES_OF_A_BLOCK = 227 * 1024


@pytest.fixture(scope="module")
def reports():
    """What the ops compile for Hopper, after each of two batches of different shapes."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.hopper_dry_run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX_KERNELS)
def test_hopper_kernels_use_warpgroup_products_and_fit_a_multiprocessor(reports, name):
    assert reports[-1][name]["wgmma"]
    assert reports[-1][name]["shared_bytes"] <= SHARED_BYTES_OF_A_BLOCK


@pytest.mark.slow
def test_a_batch_of_a_new_shape_compiles_nothing(reports):
    assert len(reports) == 2
    assert reports[1] == reports[0]
