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
    """What the kernels compile for Hopper, for weights of two heights."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.linear_dry_run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_the_kernels_fit_a_multiprocessor_and_more_than_few_tokens_use_warpgroup_products(reports):
    kernels = reports[-1]
    assert kernels["linear_narrow_kernel"]["wgmma"]
    assert kernels["linear_hopper_kernel"]["wgmma"]
    assert max(kernel["shared_bytes"] for kernel in kernels.values()) <= SHARED_BYTES_OF_A_BLOCK


@pytest.mark.slow
def test_neither_tokens_nor_rows_compile_anew(reports):
    """Only the number of inputs, the format and the octets of tokens do."""
    assert len(reports) == 2
    assert reports[1] == reports[0]
    assert reports[0]["_linear_few_kernel"]["programs"] == 2 * 3
