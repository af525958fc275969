import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES_OF_A_BLOCK = 227 * 1024


@pytest.fixture(scope="module")
def reports():
    """What router and experts compile for Hopper, after each of two rounds of batches with as many rows per expert."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.moe_dry_run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_all_configurations_fit_a_multiprocessor_and_use_warpgroup_products(reports):
    assert reports[-1]["_grouped_hopper_kernel"]["wgmma"]
    assert max(kernel["shared_bytes"] for kernel in reports[-1].values()) <= SHARED_BYTES_OF_A_BLOCK


@pytest.mark.slow
def test_a_batch_of_a_new_size_compiles_nothing(reports):
    assert len(reports) == 2
    assert {name: kernel["programs"] for name, kernel in reports[1].items()} == {
        name: kernel["programs"] for name, kernel in reports[0].items()
    }
